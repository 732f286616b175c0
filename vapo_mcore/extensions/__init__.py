"""A user's own estimator, loss term, verifier or task: one file outside the package, named in the configuration.

``loading`` imports what a reference names, ``signature`` says which inputs and options a function asks for, ``points`` which there
are, ``check`` tries everything before a model loads. How to write one: ``docs/extending.md``.
"""
