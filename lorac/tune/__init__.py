"""Searching launch configurations on the present GPU. `lorac.tune.run.tune` is the whole of it."""
