"""Which schedule a call runs, and that schedule made concrete.

select         which algorithm a call gets
predict        the expected time of a schedule between hosts
tuned          the table that `unisono tune` has written
plans          layout of chunks, pieces, fingerprint; codec_plans: with a codec
codec_options  which codec a call may use, and the bound of its error
"""
