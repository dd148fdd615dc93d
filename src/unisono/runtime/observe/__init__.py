"""What happened, and what would happen.

failures       the engine's failure codes in words; raising: the errors of calls
recorder       the flight recorder: the last 2,000 calls of a rank
tracing        recording a trace
monitor        a thread that answers `unisono top` and `unisono trace why`
traffic        how many bytes went to which rank
explain        `comm.explain`; explain_codecs: of a call with a codec
"""
