"""What `interop/ray.py` is made of.

gang         the driver: a placement group, its actors, their failures
member       the actor: one rank
collective   a group of `ray.util.collective`
"""
