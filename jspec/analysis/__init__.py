"""Tools that look at generations: one round in detail, checks of drafters, evaluation, plots."""
