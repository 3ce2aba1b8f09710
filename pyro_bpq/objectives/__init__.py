"""What a user hands to ``SVI``.

The ELBO, an expected cost, the importance-weighted bound, and what they are made of. Imports everything below. Read
``objective.py`` first, then ``runner.py`` for the path of one step.

State lies in four places, which ``Objective.mark`` lists: how particles run (``particle_count.py``), what is known of
the programs (recordings and plans of the runner), how many generators of noise there were, and what is learned
(``critic_trainer.py``). A step that fails takes all of them back.
"""
