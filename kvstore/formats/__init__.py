"""KV as other programs write it down: read into a store, and written out of one.

`corellm` is the checkpoint folder of the published app for its Core ML bundles; `docs/checkpoint.md` describes it.

Order: errors · corellm_geometry · corellm · corellm_rows · corellm_folder · corellm_store
"""
