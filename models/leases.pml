/*
 * Leases of a pool: managers grant and end extents of one member with transactions of the registry, its node lends memory by
 * tickets and frees it by orders, and programs show any ticket that was ever signed, at any time.
 *
 * The model follows src/farpool/cluster/leases (changes.py: which entries a decision reads and writes), the deliverer of orders
 * in src/farpool/cluster/manager, and native/node/claiming.cpp (claims, and orders that are carried out).
 *
 * Each `d_step` block is one transaction of the registry, or one step of the node under its lock. Between two of them any other
 * process may run for as long as it likes, so a manager may be killed anywhere, and another one goes on with what the registry
 * has. There is no clock: a lease may pass its expiry at any time, and no ticket and no order is ever too old to arrive. So the
 * model shows what epochs alone guarantee.
 *
 * Many managers may decide at the same time. A transaction that succeeds has read what is in the registry at that moment, so one
 * process (Managers) reads and writes in one step, for all of them. One slow manager (Slow) writes much later than it has read.
 * If an entry changes that the slow manager's transaction has a condition on, the transaction can only fail, and the model drops
 * the request at once.
 *
 * It leaves out: several members, bytes (each extent is one unit), members that were removed, and a registry that was restored
 * from a backup, for which epochs also contain the time.
 *
 * Environment: DEFECT=n builds a defect in, and CAPACITY=n sets the extents that the member can lend (1 or 2).
 */

#define LEASES 2
#define EXTENTS 3

/* Defects. */
#define GRANT_IGNORES_ACCOUNT 1      /* a grant has no condition on the member's account */
#define END_COUNTS_AS_FREE 2         /* bytes of an extent that ends are free before its node confirms */
#define CONFIRM_BEFORE_ANSWER 3      /* a manager confirms an order that the node has not answered */
#define CONFIRM_UNCONDITIONALLY 4    /* a manager confirms on no condition, so two of them confirm one order */
#define EXPIRE_IGNORES_RENEWAL 5     /* a lease that has expired ends although it was renewed since */
#define RENEW_IGNORES_END 6          /* a renewal writes the lease's former entry although extents have ended since */
#define SAME_EPOCH 7                 /* the epoch of a lease stays when memory is taken from it */
#define NUMBER_AGAIN 8               /* a member gives the number of an extent that has ended again */
#define FIRST_EPOCH_AGAIN 9          /* a lease that is granted again begins with the first epoch */
#define CONFIRM_FORGETS_EPOCH 10     /* a confirmed order leaves no epoch in the member's account */
#define FREES_AT_EXPIRY 11           /* a node frees an extent whose ticket has expired */
#define FENCE_IN_MEMORY 12           /* a node that restarts has forgotten the epochs of orders */
#define CHECKS_AT_CLAIM 13           /* a node checks the epoch at the claim, and not at each write */
#define CHECKS_AT_REQUEST 14         /* a node checks the epoch at the request of a write, and not when its bytes arrive */
#define CLAIM_CHECKS_ONCE 15         /* a node does not check the epoch again after it has made an extent */
#define ORDER_ENDS_LEASE 16          /* a node ends all extents of a lease at an order for one */
#define ORDER_WITHOUT_FENCE 17       /* a node that ends an extent does not raise the lease's epoch */

/* Requests of the slow manager. */
#define NOTHING 0
#define GRANT 1      /* to the lease `slow_of`, or one more extent for it */
#define RENEW 2
#define END 3        /* of the lease `slow_of` */
#define EXPIRE 4
#define TAKE 5       /* of the extent `slow_of` */
#define CONFIRM 6

byte defect = 0, capacity = 1;

/* The registry. A lease exists while it has an extent. */
bool leased[EXTENTS + 1];       /* the extent is in a lease's entry */
bool ordered[EXTENTS + 1];      /* there is an order to end it */
byte owner[EXTENTS + 1];        /* its lease */
byte order_epoch[EXTENTS + 1];  /* of its order, which was signed; 0 if there was none */
byte tickets[EXTENTS + 1];      /* the epochs of signed tickets that name it, one bit each */
byte epoch[LEASES + 1];
bool expired[LEASES + 1];       /* since its last renewal, the lease has passed its expiry */
byte lent = 0, next = 1, confirmed_epoch = 0;  /* the member's account */

/* The slow manager: its request, and what it has read for it. */
byte slow = NOTHING, slow_of = 0, slow_lent = 0, slow_next = 0, slow_extents = 0, slow_epoch = 0;

/* The node. Its extents and the epochs of leases are in names of files. */
byte present[EXTENTS + 1];      /* the highest epoch of a ticket that names the extent; 0 if it is not there */
byte tenure[LEASES + 1];        /* the highest epoch that the node knows of the lease */
byte claim[EXTENTS + 1];        /* the epoch of a session's claim */
byte making = 0, making_epoch = 0;  /* a claim whose extent is being made */
byte writing = 0;               /* an extent to which a write is under way */

/* History, for the invariants. */
bool was_made[EXTENTS + 1], answered[EXTENTS + 1];
byte answered_epoch[LEASES + 1];

#define EXISTS(l) ((leased[1] && owner[1] == l) || (leased[2] && owner[2] == l) || (leased[3] && owner[3] == l))
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define MINE(l, n) (leased[n] && owner[n] == l)
#define SLOW_LEASE (slow == TAKE -> owner[slow_of] : slow_of)

byte at, top, wanted;  /* used within a step, and 0 between steps */

inline forget_request()
{
    slow = NOTHING; slow_of = 0; slow_lent = 0; slow_next = 0; slow_extents = 0; slow_epoch = 0
}

/* A lease's entry has changed. */
inline changed_lease(l)
{
    if
    :: (slow == GRANT || slow == END || slow == TAKE) && SLOW_LEASE == l -> forget_request()
    :: slow == RENEW && slow_of == l && defect != RENEW_IGNORES_END -> forget_request()
    :: slow == EXPIRE && slow_of == l && defect != EXPIRE_IGNORES_RENEWAL -> forget_request()
    :: else
    fi
}

/* The member's account has changed. */
inline changed_account()
{
    if
    :: slow == GRANT && defect != GRANT_IGNORES_ACCOUNT -> forget_request()
    :: slow == CONFIRM && defect != CONFIRM_UNCONDITIONALLY -> forget_request()
    :: else
    fi
}

/* Sets `top` to the highest epoch of all entries. */
inline read_epochs()
{
    top = MAX(1, confirmed_epoch);
    top = (EXISTS(1) -> MAX(top, epoch[1]) : top);
    top = (EXISTS(2) -> MAX(top, epoch[2]) : top);
    top = (ordered[1] -> MAX(top, order_epoch[1]) : top);
    top = (ordered[2] -> MAX(top, order_epoch[2]) : top);
    top = (ordered[3] -> MAX(top, order_epoch[3]) : top)
}

/* A manager may sign a ticket for a lease's entry, now or much later. */
inline sign_ticket(l)
{
    assert(!EXISTS(l) || epoch[l] <= 3);  /* Node claims tickets of these epochs alone */
    for (at : 1 .. EXTENTS) {
        if
        :: MINE(l, at) -> tickets[at] = tickets[at] | (1 << epoch[l])
        :: else
        fi
    }
    at = 0
}

/* Lends the next extent of an account (as it was read) to a lease. */
inline grant(l, its_lent, its_next)
{
    read_epochs();
    epoch[l] = (EXISTS(l) -> epoch[l] : (defect == FIRST_EPOCH_AGAIN -> 1 : top));
    top = 0;
    wanted = its_next;
    if
    :: defect == NUMBER_AGAIN && order_epoch[1] != 0 && !ordered[1] && !leased[1] -> wanted = 1
    :: else -> next = its_next + 1
    fi;
    assert(!leased[wanted] && tickets[wanted] == 0);  /* no extent is in two leases, nor in one lease after another */
    lent = its_lent + 1;
    leased[wanted] = true;
    owner[wanted] = l;
    wanted = 0;
    expired[l] = false;
    sign_ticket(l);
    changed_lease(l);
    changed_account()
}

inline renew(l)
{
    expired[l] = false;
    sign_ticket(l);
    changed_lease(l)
}

/* Takes an extent, or all (n is 0), from a lease. */
inline take(l, n)
{
    read_epochs();
    epoch[l] = (defect == SAME_EPOCH -> epoch[l] : top + 1);
    top = 0;
    for (at : 1 .. EXTENTS) {
        if
        :: MINE(l, at) && (n == 0 || n == at) ->
            leased[at] = false;
            ordered[at] = true;
            order_epoch[at] = epoch[l];
            lent = (defect == END_COUNTS_AS_FREE -> lent - 1 : lent)
        :: else
        fi
    }
    at = 0;
    sign_ticket(l);
    changed_lease(l);
    if
    :: !EXISTS(l) -> epoch[l] = 0; expired[l] = false
    :: else
    fi
}

/* Deletes an order that the node has answered; its bytes are free. */
inline confirm(n, its_lent)
{
    ordered[n] = false;
    lent = (defect == END_COUNTS_AS_FREE || its_lent == 0 -> lent : its_lent - 1);
    confirmed_epoch = (defect == CONFIRM_FORGETS_EPOCH -> confirmed_epoch : MAX(confirmed_epoch, order_epoch[n]));
    changed_account();
    if
    :: slow == CONFIRM && slow_of == n && defect != CONFIRM_UNCONDITIONALLY -> forget_request()
    :: else
    fi
}

#define CAN_CONFIRM(n) (ordered[n] && (answered[n] || defect == CONFIRM_BEFORE_ANSWER))

/* Managers that have read the registry as it is. */
active proctype Managers()
{
end:
    do
    :: d_step { lent < capacity && next <= EXTENTS -> grant(1, lent, next) }
    :: d_step { lent < capacity && next <= EXTENTS -> grant(2, lent, next) }
    :: d_step { EXISTS(1) && expired[1] -> renew(1) }
    :: d_step { EXISTS(2) && expired[2] -> renew(2) }
    :: d_step { EXISTS(1) -> take(1, 0) }
    :: d_step { EXISTS(2) -> take(2, 0) }
    :: d_step { leased[1] -> take(owner[1], 1) }
    :: d_step { leased[2] -> take(owner[2], 2) }
    :: d_step { leased[3] -> take(owner[3], 3) }
    :: d_step { CAN_CONFIRM(1) -> confirm(1, lent) }
    :: d_step { CAN_CONFIRM(2) -> confirm(2, lent) }
    :: d_step { CAN_CONFIRM(3) -> confirm(3, lent) }
    :: d_step { EXISTS(1) && !expired[1] -> expired[1] = true }
    :: d_step { EXISTS(2) && !expired[2] -> expired[2] = true }
    od
}

/* Reads what a request for a lease or an extent needs. */
inline ask(request, which)
{
    slow = request;
    slow_of = which;
    if
    :: request == GRANT -> slow_lent = lent; slow_next = next
    :: request == CONFIRM -> slow_lent = lent
    :: request == RENEW ->
        slow_extents = MINE(which, 1) + 2 * MINE(which, 2) + 4 * MINE(which, 3);
        slow_epoch = epoch[which]
    :: else
    fi
}

/* Writes a lease's entry as it was read. */
inline renew_as_read()
{
    if
    :: defect == RENEW_IGNORES_END ->
        for (at : 1 .. EXTENTS) {
            if
            :: slow_extents & (1 << (at - 1)) -> leased[at] = true
            :: else
            fi
        }
        at = 0;
        epoch[slow_of] = slow_epoch
    :: else
    fi;
    wanted = slow_of;
    forget_request();
    renew(wanted);
    wanted = 0
}

/* A manager that writes later than it reads. */
active proctype Slow()
{
end:
    do
    :: d_step { slow == NOTHING && lent < capacity && next <= EXTENTS -> ask(GRANT, 1) }
    :: d_step { slow == NOTHING && lent < capacity && next <= EXTENTS -> ask(GRANT, 2) }
    :: d_step { slow == NOTHING && EXISTS(1) -> ask(RENEW, 1) }
    :: d_step { slow == NOTHING && EXISTS(1) && expired[1] -> ask(EXPIRE, 1) }
    :: d_step { slow == NOTHING && EXISTS(1) -> ask(END, 1) }
    :: d_step { slow == NOTHING && leased[1] -> ask(TAKE, 1) }
    :: d_step { slow == NOTHING && leased[2] -> ask(TAKE, 2) }
    :: d_step { slow == NOTHING && CAN_CONFIRM(1) -> ask(CONFIRM, 1) }
    :: d_step { slow == NOTHING && CAN_CONFIRM(2) -> ask(CONFIRM, 2) }
    :: d_step { slow == GRANT -> grant(slow_of, slow_lent, slow_next); forget_request() }
    :: d_step { slow == RENEW -> renew_as_read() }
    :: d_step { slow == END -> take(slow_of, 0); forget_request() }
    :: d_step {
        slow == EXPIRE ->
        assert(!EXISTS(slow_of) || expired[slow_of]);  /* no lease ends that was renewed in time */
        take(slow_of, 0);
        forget_request()
    }
    :: d_step { slow == TAKE -> take(owner[slow_of], slow_of); forget_request() }
    :: d_step { slow == CONFIRM -> confirm(slow_of, slow_lent); forget_request() }
    od
}

/* The node accepts a ticket of epoch e for an extent. */
#define ACCEPTS(n, e) (e >= tenure[owner[n]])

inline enter(n, e, by_session)
{
    if
    :: present[n] == 0 ->
        assert(!was_made[n] && !answered[n]);  /* expiry alone never frees; an extent that has ended never comes back */
        was_made[n] = true
    :: else
    fi;
    present[n] = MAX(present[n], e);
    assert((present[1] != 0) + (present[2] != 0) + (present[3] != 0) <= capacity);  /* no memory is lent twice */
    tenure[owner[n]] = MAX(tenure[owner[n]], e);
    claim[n] = (by_session -> e : claim[n])
}

inline restart()
{
    claim[1] = 0; claim[2] = 0; claim[3] = 0;
    making = 0; making_epoch = 0; writing = 0;
    if
    :: defect == FENCE_IN_MEMORY ->
        tenure[1] = 0; tenure[2] = 0;
        for (at : 1 .. EXTENTS) {
            if
            :: present[at] != 0 -> tenure[owner[at]] = MAX(tenure[owner[at]], present[at])
            :: else
            fi
        }
        at = 0
    :: else
    fi
}

inline end_extent(n)
{
    assert(!leased[n]);  /* no order ends an extent that a lease has */
    present[n] = 0; claim[n] = 0
}

/* Carries an order out, which may come at any time and again and again. */
inline carry_out(n)
{
    assert(present[n] < order_epoch[n]);  /* no order is too early for the node */
    if
    :: defect != ORDER_WITHOUT_FENCE -> tenure[owner[n]] = MAX(tenure[owner[n]], order_epoch[n])
    :: else
    fi;
    /* A node refuses no ticket of a lease's present epoch. */
    assert(!EXISTS(owner[n]) || tenure[owner[n]] <= epoch[owner[n]]);
    for (at : 1 .. EXTENTS) {
        if
        :: present[at] != 0 && (at == n || (defect == ORDER_ENDS_LEASE && owner[at] == owner[n])) -> end_extent(at)
        :: else
        fi
    }
    at = 0;
    answered[n] = true;
    answered_epoch[owner[n]] = MAX(answered_epoch[owner[n]], order_epoch[n])
}

inline arrive(n)
{
    if
    :: present[n] != 0 && (claim[n] >= tenure[owner[n]] || defect == CHECKS_AT_REQUEST || defect == CHECKS_AT_CLAIM) ->
        /* No byte of a write under an earlier epoch arrives once the node has answered an order. */
        assert(claim[n] >= answered_epoch[owner[n]])
    :: else
    fi;
    writing = 0
}

#define SIGNED(n, e) (tickets[n] & (1 << e))
#define CLAIM(n, e) \
    :: d_step { SIGNED(n, e) && ACCEPTS(n, e) && present[n] != 0 && claim[n] != e -> enter(n, e, true) } \
    :: d_step { SIGNED(n, e) && ACCEPTS(n, e) && present[n] != 0 && present[n] < e -> enter(n, e, false) } \
    :: d_step { SIGNED(n, e) && ACCEPTS(n, e) && present[n] == 0 && making == 0 -> making = n; making_epoch = e }
#define WRITE(n) \
    :: d_step { \
        writing == 0 && claim[n] != 0 && present[n] != 0 && (claim[n] >= tenure[owner[n]] || defect == CHECKS_AT_CLAIM) -> \
        writing = n \
    }

active proctype Node()
{
end:
    do
    CLAIM(1, 1) CLAIM(1, 2) CLAIM(1, 3)
    CLAIM(2, 1) CLAIM(2, 2) CLAIM(2, 3)
    CLAIM(3, 1) CLAIM(3, 2) CLAIM(3, 3)
    :: d_step {
        making != 0 ->
        if
        :: ACCEPTS(making, making_epoch) || defect == CLAIM_CHECKS_ONCE -> enter(making, making_epoch, true)
        :: else
        fi;
        making = 0; making_epoch = 0
    }
    WRITE(1) WRITE(2) WRITE(3)
    :: d_step { writing != 0 -> arrive(writing) }
    :: d_step { order_epoch[1] != 0 -> carry_out(1) }
    :: d_step { order_epoch[2] != 0 -> carry_out(2) }
    :: d_step { order_epoch[3] != 0 -> carry_out(3) }
    :: d_step { claim[1] + claim[2] + claim[3] + making + writing != 0 || defect == FENCE_IN_MEMORY -> restart() }
    :: d_step { defect == FREES_AT_EXPIRY && present[1] != 0 -> present[1] = 0; claim[1] = 0 }
    od
}

init
{
    c_code {
        const char *text = getenv("DEFECT");
        now.defect = text ? atoi(text) : 0;
        text = getenv("CAPACITY");
        now.capacity = text ? atoi(text) : 1;
    }
}
