"""The embedded store: one directory on tmpfs or NVMe, shared by all processes of a host."""
