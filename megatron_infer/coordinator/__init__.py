"""One front for several replicas: the coordinator process, its protocol, clients and replicas."""
