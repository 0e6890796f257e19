"""Executable forms of the contracts, for the tests of whoever implements one."""
