"""runtime: services -- files, devices, checks, configs as plain data, and Ctrl-C.

It imports no other package of Esper, and nothing here knows of networks, policies or growth.
"""
