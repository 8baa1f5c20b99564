"""The main job: training one workload under one recipe, or under many side by side.

    measure   bytes by role and the peak of a step, counted, not estimated
    engine    one model under one recipe (or under plain torch, the peer everything is compared with)
    rundir    the folder a run writes: settings, metrics line by line, checkpoints, result
    compare   many recipes interleaved in time, one table
    train     one recipe, a real run
    planner   what a step will need before there is one

Only the command line and the report stand above this package; it uses lowprec by its public names alone.
"""
