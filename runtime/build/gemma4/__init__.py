"""runtime.build.gemma4: Gemma 4's text decoder as a bundle of the published shape.

Order: spec · config · model · graph · description · parts · tokens · folder · sizes · tiny · drafts
"""
