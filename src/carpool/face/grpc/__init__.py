"""The gRPC face. Only processes that serve gRPC import it: it needs `carpool[grpc]`, and grpcio takes its time."""

import os

# grpcio's own log is for its developers. It reads this variable once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
