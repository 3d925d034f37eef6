"""Before a mesh trains: does it compute the gradients and updates of one process?"""
