"""What was measured, as lines of a file that the published app's `metrics.jsonl` can be put beside: written, summed up and drawn.

Order: records · generated · machine · logfile · journal · spread · summary · summary_text · latency_plot
"""
