"""What processes are made of: the runtime that all share, a gateway half, a batcher half, and the admin port.

`embedded.py` and `distributed.py` put them together, one class for each role.
"""
