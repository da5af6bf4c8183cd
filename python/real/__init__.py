"""Models of RecBole, TorchRec and transformers, and of papers, as packages: ``scripts/real_models.py`` measures them."""
