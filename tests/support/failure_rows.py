"""Losses that ``ftckpt plan`` answers for, by their names in its table and its JSON."""

ONE_ARENA, TWO_ARENAS = "one rank's arena", "any two arenas"
ONE_NODE, TWO_NODES = "one node", "any two nodes"
ONE_RACK, ONE_SMP = "one rack", "the SMP of a node"
