"""The pure-Python backend: the readable specification of kvpool and the oracle of the native one.

Layers, lowest first: ``core`` (numbers), ``device`` (bytes, streams, events), ``storage`` (slots), ``sequence`` (one
request), ``manager`` (all requests).  No layer names a type of a higher one.  Needs numpy and nothing compiled.
"""
