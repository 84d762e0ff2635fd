"""The hybrid decoder: GDN and full-attention layers, their MLPs, embedding and head, as pure functions."""
