/*
 * Names: writers publish versions, sweeps release the objects of old versions, and readers hold the version that they read.
 *
 * The model follows src/farpool/cluster/names: sending.py (how a writer sends and records objects), writer.py (how it moves the
 * name), sweep.py (steps 1 to 5 of a sweep) and names.py (how a reader holds a version). All versions here share the one object
 * that they have, because sharing is the hard case: a sweep of an old version must not release an object that a new one needs.
 *
 * One node keeps the object. Each `d_step` block is one transaction of the registry, or one request to the node. Between two of
 * them any other process may run for as long as it likes, so each process may be stopped anywhere and continue much later. A
 * lease may end at any time, and its holder learns of it only from a transaction that fails.
 *
 * It leaves out: several nodes and nodes that are away, and several objects in a version.
 *
 * Environment: DEFECT=n builds a defect in.
 */

#define WRITERS 2
#define NONE 0       /* no entry; no program */
#define RECORDED 1   /* the version's entry is under publication/ */
#define RELEASED 2   /* the version's entry is under released/ */

/* Defects. */
#define RELEASE_IGNORES_MARKS 1      /* a node releases a copy whatever its mark is */
#define KEEP_IGNORES_MARKS 2         /* a node keeps a copy whatever its mark is */
#define SWEEP_READS_ONCE 3           /* a sweep does not read the registry again after it has read the marks */
#define RECORD_AFTER_KEEP 4          /* a writer records its objects after nodes keep them */
#define MOVE_WITHOUT_HOLD 5          /* a writer moves the name although its hold has ended */
#define KEEP_AGAIN_SAME_MARK 6       /* a node gives no other mark to a copy that it keeps again */
#define READER_IGNORES_MOVE 7        /* a reader holds a version without the condition that it is still the current one */
#define OLDER_IGNORES_RELEASE 8      /* a reader holds an older version without the condition that no sweep has released it */
#define RELEASE_IGNORES_HOLDS 9      /* a sweep ignores the holds of readers */
#define WRITER_SKIPS_HOLD_CHECK 10   /* a writer that has read new marks does not ask the registry for its hold */
#define DELETE_BEFORE_RELEASE 11     /* a sweep deletes a version's entry before the node has released its copy */
#define PREVIOUS_NOT_HELD 12         /* a writer that moves the name gives no hold to the previous version */
#define DELETES_UNKNOWN 13           /* a sweep deletes entries that it had not read before it read the marks */

byte defect = 0;

/* The registry. Writer v publishes version v; version 0 stands for no version. */
byte current = 0;
byte role = NONE;                 /* the writer that has the role; its entry ends with the writer's lease */
byte entry[WRITERS + 1];          /* NONE, RECORDED or RELEASED, by version */
bool was_current[WRITERS + 1];    /* the name's history has the version */
bool writer_holds[WRITERS + 1];   /* ends with the writer's lease */
bool previous_holds[WRITERS + 1];
bool reader_holds[WRITERS + 1];   /* ends with the reader's lease */
/* The node: its copy of the object. */
bool there = false, kept = false;
bool changed[5];                  /* by process: the copy has another mark since the process has read it */
bool in_time[WRITERS + 1];        /* the version is a previous one, and its hold has not ended */

/* Of two equal processes, one starts first. */
bool writer_started = false, sweep_started = false;

#define IS_HELD(v) (current == v || writer_holds[v] || previous_holds[v] || \
    (reader_holds[v] && defect != RELEASE_IGNORES_HOLDS))

inline new_mark() { changed[1] = true; changed[2] = true; changed[3] = true; changed[4] = true }

/* At each change of the copy or of the name. */
inline check()
{
    assert(current == 0 || kept);                                   /* the current version can be read */
    assert(kept -> (entry[1] != NONE || entry[2] != NONE) : true);  /* a sweep will find each copy that is kept */
    assert((in_time[1] || in_time[2]) -> kept : true)               /* a version stays for a time after it is replaced */
}

/* The copy is sent if it is not there, and its mark is read. */
inline send(me)
{
    d_step {
        if
        :: !there -> there = true; new_mark()
        :: else
        fi;
        changed[me] = false
    }
}

inline record(v, done)
{
    d_step {
        done = (role == v);
        if
        :: done -> entry[v] = RECORDED; writer_holds[v] = true
        :: else
        fi
    }
}

/* The node keeps a copy that has the mark, or that it keeps already. */
inline keep(me, done)
{
    d_step {
        done = there && (!changed[me] || kept || defect == KEEP_IGNORES_MARKS);
        if
        :: done ->
            if
            :: kept && defect == KEEP_AGAIN_SAME_MARK
            :: else -> new_mark()
            fi;
            kept = true;
            if
            :: defect != RECORD_AFTER_KEEP -> check()
            :: else
            fi
        :: else
        fi
    }
}

/* The version that is replaced stays for a time. */
inline replace()
{
    if
    :: current != 0 ->
        previous_holds[current] = (defect != PREVIOUS_NOT_HELD);
        in_time[current] = true
    :: else
    fi
}

inline move(v, done)
{
    d_step {
        done = (role == v && writer_holds[v]) || defect == MOVE_WITHOUT_HOLD;
        if
        :: done ->
            replace();
            current = v;
            was_current[v] = true;
            writer_holds[v] = false;
            check()
        :: else
        fi
    }
}

proctype Writer(byte v)
{
    bool done = false, again = false;

    d_step { role == NONE && (v == 1 || writer_started) -> role = v; writer_started = true }
    send(v);
    if
    :: defect != RECORD_AFTER_KEEP ->
        record(v, done);
        if
        :: !done -> goto lost
        :: else
        fi
    :: else
    fi;
    keep(v, done);
    if
    :: !done -> /* the copy has been evicted, or has another mark */
        send(v);
        d_step { again = writer_holds[v] || defect == WRITER_SKIPS_HOLD_CHECK };
        if
        :: !again -> goto lost
        :: else
        fi;
        keep(v, done);
        if
        :: !done -> goto lost
        :: else
        fi
    :: else
    fi;
    if
    :: defect == RECORD_AFTER_KEEP ->
        record(v, done);
        if
        :: !done -> goto lost
        :: else
        fi
    :: else
    fi;
    move(v, done);
lost:
    skip;
    d_step {
        if
        :: role == v -> role = NONE; writer_holds[v] = false
        :: else
        fi;
        done = false; again = false; changed[v] = true  /* the process needs its mark no more */
    }
}

/* A writer that removes the name; it needs no objects. */
proctype Remover()
{
end:
    d_step { role == NONE && current != 0 -> replace(); current = 0; check() }
}

/* Step 1 for one version: on the condition that its entry is unchanged, it is moved. */
inline retire(v)
{
    if
    :: unheld[v] -> d_step {
        unheld[v] = false;
        if
        :: entry[v] == RECORDED -> entry[v] = RELEASED
        :: else
        fi
    }
    :: else
    fi
}

/* Step 3 for one version. */
inline look(v)
{
    if
    :: defect == SWEEP_READS_ONCE -> release = release || finished[v]
    :: defect != SWEEP_READS_ONCE && entry[v] == RELEASED && !IS_HELD(v) ->
        release = true;
        finished[v] = finished[v] || defect == DELETES_UNKNOWN
    :: defect != SWEEP_READS_ONCE && (entry[v] == RECORDED || (entry[v] == RELEASED && IS_HELD(v))) ->
        needed = true;
        finished[v] = false
    :: defect != SWEEP_READS_ONCE && entry[v] == NONE -> finished[v] = false
    fi
}

inline delete_entries()
{
    d_step {
        if
        :: finished[1] && entry[1] == RELEASED -> entry[1] = NONE
        :: else
        fi;
        if
        :: finished[2] && entry[2] == RELEASED -> entry[2] = NONE
        :: else
        fi;
        check()
    }
}

proctype Sweep(byte me)
{
    bool unheld[WRITERS + 1];
    bool finished[WRITERS + 1];  /* versions without a hold at step 1, whose entries are deleted at the end */
    bool seen = false;           /* the node had a copy at step 2; otherwise the sweep does not ask it to release one */
    bool needed = false, release = false, refused = false;

    d_step {  /* all entries at one revision */
        me == 3 || sweep_started ->
        sweep_started = true;
        unheld[1] = (entry[1] == RECORDED && !IS_HELD(1));
        unheld[2] = (entry[2] == RECORDED && !IS_HELD(2));
        finished[1] = (entry[1] != NONE && !IS_HELD(1));
        finished[2] = (entry[2] != NONE && !IS_HELD(2))
    };
    if
    :: !finished[1] && !finished[2] -> goto over
    :: else
    fi;
    retire(1);
    retire(2);
    d_step { seen = there; changed[me] = !there };  /* step 2 */
    d_step {  /* step 3 */
        look(1);
        look(2);
        release = release && !needed && seen
    };
    if
    :: defect == DELETE_BEFORE_RELEASE -> delete_entries()
    :: else
    fi;
    d_step {  /* step 4 */
        if
        :: release && there && (!changed[me] || defect == RELEASE_IGNORES_MARKS) -> kept = false; new_mark(); check()
        :: release && there && changed[me] && defect != RELEASE_IGNORES_MARKS -> refused = true
        :: else
        fi
    };
    if
    :: !refused -> delete_entries()
    :: else
    fi;
over:
    skip;
    d_step {
        seen = false; needed = false; release = false; refused = false;
        unheld[1] = false; unheld[2] = false; finished[1] = false; finished[2] = false
    }
}

/* Opens the current version, or an older one, and reads its object while its hold lasts. */
proctype Reader()
{
    byte v = 0;
    bool holding = false;

end:  /* if nothing is published */
    if
    :: d_step { current != 0 -> v = current };
        d_step {
            holding = (current == v || defect == READER_IGNORES_MOVE);
            reader_holds[v] = holding
        }
    :: d_step { was_current[1] && current != 1 -> v = 1 };
        d_step {
            holding = (entry[1] == RECORDED || defect == OLDER_IGNORES_RELEASE);
            reader_holds[1] = holding
        }
    fi;
    if
    :: holding ->
        d_step {
            assert(!reader_holds[v] || kept);  /* if the lease has ended since, nothing is promised */
            reader_holds[v] = false;
            v = 0; holding = false
        }
    :: else
    fi
}

/* Leases end whenever they like, and the node evicts a copy that it does not keep. */
proctype Time()
{
end:
    do
    :: d_step { role != NONE -> writer_holds[role] = false; role = NONE }
    :: d_step { there && !kept -> there = false; new_mark() }
    :: d_step { in_time[1] -> previous_holds[1] = false; in_time[1] = false }
    :: d_step { in_time[2] -> previous_holds[2] = false; in_time[2] = false }
    :: d_step { reader_holds[1] -> reader_holds[1] = false }
    :: d_step { reader_holds[2] -> reader_holds[2] = false }
    od
}

init
{
    c_code {
        const char *text = getenv("DEFECT");
        now.defect = text ? atoi(text) : 0;
    };
    atomic {
        new_mark();
        run Writer(1);
        run Writer(2);
        run Sweep(3);
        run Sweep(4);
        run Remover();
        run Reader();
        run Time()
    }
}
