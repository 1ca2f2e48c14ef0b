"""A run on disk: its typed manifest, where it is stored, its tables, the `Index` that reads them, and exports."""
