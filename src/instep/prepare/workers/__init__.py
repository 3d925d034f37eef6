"""The processes of a preparation, here and on other hosts: started, given tasks, watched."""
