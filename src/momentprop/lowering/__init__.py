"""Turns a converted network into one flat program: frozen weights, any batch size, compiled loops."""
