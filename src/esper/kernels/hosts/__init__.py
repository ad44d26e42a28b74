"""Hosts trained by compiled code on the CPU, one host after the other, each with its own seeds."""
