"""A job's state as data: fragments, manifests, objects, snapshots, topology, layouts, replica sets, lineage.

Pure: no torch.distributed, no files. All other folders use these types.
"""
