"""`make venv`: install the locked packages of the CPU machine into .venv, or notice quickly that they are there.

Runs before anything is installed, so it uses the standard library only.
"""
