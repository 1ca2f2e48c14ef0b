"""Any transformer as a stack of memories."""
