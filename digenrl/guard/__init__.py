"""Notices that a reward is gamed: the trained reward rises, and what it was to stand for does not.

gold         rewards that are evaluated and never trained on
pictures     statistics of pictures: what blank, garish, noisy or repeated ones have in common
inspection   what a worker finds out about the pictures of one evaluation
evidence     what is known of an evaluation and of the iterations before it
checks       one function for each thing that is watched: evidence -> value and level
watch        ok, warn, stop: patience, and which evaluation was the last good one

Everything here is a function of what was evaluated, never of when or where.
"""
