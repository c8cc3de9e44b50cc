"""What is guaranteed for pruned rows, layers and the network (T11, T12, T17-T19)."""
