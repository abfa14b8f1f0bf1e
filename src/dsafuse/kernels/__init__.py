"""HOW it is computed: Triton device functions of the roles, the grids that combine them, and their launches."""
