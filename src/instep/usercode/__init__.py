"""State that the user's code keeps in Python, and how it uses it: looked at, and put back.

Way in: `counts.Counts`. Used by what tries models, losses and optimizers, and by what reads data.
"""
