"""Runs of two machines: network namespaces with a hostname and a hosts file of their own."""
