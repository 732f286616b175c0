"""Train a policy and its critic.

``main`` builds a run, ``loop`` drives it from step to step, ``step`` runs one step: sample and grade responses, compute advantages, update
the critic and the policy, and send the new weights to the rollout engine.
"""
