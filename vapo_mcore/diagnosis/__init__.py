"""Rules over the metrics of past steps that detect known failures of a run, with the evidence and the usual remedy.

``rules`` holds pure functions of rows of metrics.jsonl; ``monitor`` applies them after each step. Neither needs torch.
"""
