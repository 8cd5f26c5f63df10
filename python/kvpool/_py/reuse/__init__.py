"""What is cached: the tree of committed blocks, and which prefix of a prompt it can serve."""
