"""Small models of well-known kinds, trained on a synthetic shop and exported to ``models/``; ``make_zoo.py`` runs them."""
