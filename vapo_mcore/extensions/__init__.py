"""Extensions: user-defined advantage estimators, objectives, and loss terms, in a file that the configuration names.

``loading`` imports the function that a reference names. ``signature`` reads the inputs and options from its parameters. ``points``
defines the inputs of each extension point and calls the function. How to write an extension: ``docs/extending.md``.
"""
