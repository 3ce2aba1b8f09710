"""What a user hands to ``SVI``.

The ELBO, an expected cost, the importance-weighted bound, and what they are made of. Imports everything below. Read
``objective.py`` first, then ``runner.py`` for the path of one step.
"""
