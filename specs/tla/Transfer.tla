---- MODULE Transfer ----
(* A WRITE transfer over a network that loses, repeats and reorders.  The rows of both machines come from Tables.tla, which is
   generated from the code; this module says, in the coarsest terms, what their guards and actions mean, and what must hold.
   One block, one post, a peer that is always ready.  The network is a set: what was sent once may come at any later time, any
   number of times, or never.  The lease is one rule instead of clocks: D's hold never ends before P's lease does, and a grant
   that comes after the hold is void; that the stamp in a claim gives this rule is shown by the explorer, which has clocks.
   moriio_proto/testing/explore_abstract.py is the same model for the breadth-first search; both must count the same worlds. *)
EXTENDS Naturals, Tables
CONSTANT EarlyFree  \* TRUE: without the row that fences an aborted landing (must be found unsafe)
VARIABLES p,        \* state of the offer
          d,        \* state of the landing
          pend,     \* posts of P under way
          please,   \* P holds a lease on D's blocks
          comp,     \* vLLM has computed the prompt
          posted, req, handed, pset, failed, quiet,   \* of the offer
          ann, granted, gone, load,                   \* of the landing; load: 0 no blocks, 1 lent, 2 settled
          landed,   \* ghost: the block holds the KV
          bad,      \* ghost: settled twice, too early or without data, or an event without a row
          net
pvars == <<p, pend, please, posted, req, handed, pset, failed, quiet>>
dvars == <<d, ann, granted, gone, load>>
vars == <<pvars, dvars, comp, landed, bad, net>>

Init == /\ p = PInit /\ d = DInit /\ pend = 0 /\ load = 0 /\ net = {}
        /\ please = FALSE /\ comp = FALSE /\ posted = FALSE /\ req = FALSE /\ handed = FALSE /\ pset = FALSE
        /\ failed = FALSE /\ quiet = FALSE /\ ann = FALSE /\ granted = FALSE /\ gone = FALSE
        /\ landed = FALSE /\ bad = FALSE

PHolds == {g \in {"leases", "fresh", "all_released", "idle", "last_one", "all_landed", "nobody_to_tell", "owed"} :
             CASE g = "idle" -> pend = 0
               [] g \in {"last_one", "all_landed"} -> pend = 1
               [] g = "nobody_to_tell" -> quiet
               [] g = "owed" -> req /\ ~pset
               [] OTHER -> TRUE}
DHolds(g0) == {g \in {"leases", "fresh", "may_be_written", "refused"} :
             CASE g = "may_be_written" -> ann /\ g0 [] g = "refused" -> gone [] OTHER -> TRUE}

POf(ev, st) == {r \in PRows : r.ev = ev /\ r.src = st}
DOf(ev, st) == {r \in DRows : /\ r.ev = ev /\ r.src = st
                              /\ ~(EarlyFree /\ ev = "cmd_abort" /\ st = "ANNOUNCED" /\ "may_be_written" \in r.guards)}
\* the first row whose guards hold, as in the code
Taken(rows, holds) == {r \in rows : /\ r.guards \subseteq holds
                                    /\ \A q \in rows : q.rank < r.rank => ~(q.guards \subseteq holds)}

\* One event at the offer; pl0 and net0: P's lease and the network as the event finds them; cmp: what vLLM has computed.
FireP(ev, pl0, cmp, net0) ==
  LET rows == Taken(POf(ev, p), PHolds) IN
  IF rows = {} THEN /\ bad' = TRUE /\ please' = pl0 /\ net' = net0
                    /\ UNCHANGED <<p, pend, posted, req, handed, pset, failed, quiet>>
  ELSE LET r == CHOOSE x \in rows : TRUE
           a == r.acts
           h == handed \/ "hand_over" \in a
           f == failed \/ a \cap {"fail", "refuse_blocks"} # {}
           pl == pl0 \/ "extend_lease" \in a
           pumps == "pump" \in a /\ pl /\ cmp /\ ~posted
           n == pend - (IF "end_op" \in a THEN 1 ELSE 0) + (IF pumps THEN 1 ELSE 0)
           settles == "settle_now" \in a \/ ("settle_if_owed" \in a /\ h /\ ~pset)
           asks == a \cap {"send_claim", "claim_again"} # {} \/ ("meet_peer" \in a /\ r.dst = "CLAIMING")
       IN /\ p' = r.dst /\ pend' = n /\ please' = pl /\ posted' = (posted \/ pumps) /\ handed' = h /\ failed' = f
          /\ req' = (req \/ a \cap {"adopt", "adopt_over"} # {})
          /\ quiet' = (quiet \/ a \cap {"give_up", "peer_gone"} # {})
          /\ pset' = (pset \/ settles)
          /\ bad' = (settles /\ (pset \/ n > 0 \/ ~h))
          /\ net' = net0 \cup (IF asks THEN {"claim"} ELSE {})
                         \cup (IF a \cap {"tell", "refuse_blocks"} # {} THEN {IF f THEN "failed" ELSE "done"} ELSE {})
                         \cup (IF "acknowledge" \in a THEN {"released"} ELSE {})

\* One event at the landing; g0 and net0: what P was granted, and the network, as the event finds them.
FireD(ev, g0, net0) ==
  LET rows == Taken(DOf(ev, d), DHolds(g0)) IN
  IF rows = {} THEN /\ bad' = TRUE /\ granted' = g0 /\ net' = net0 /\ UNCHANGED <<d, ann, gone, load>>
  ELSE LET r == CHOOSE x \in rows : TRUE
           a == r.acts
           ld == IF "note_load" \in a THEN 1 ELSE load
           settles == a \cap {"settle_done", "settle_over"} # {}
       IN /\ d' = r.dst /\ ann' = (ann \/ a \cap {"announce", "enter_announced"} # {})
          /\ granted' = (g0 \/ a \cap {"grant", "hold"} # {})
          /\ gone' = (gone \/ "note_refused" \in a)
          /\ load' = IF settles THEN 2 ELSE ld
          /\ bad' = (settles /\ (ld # 1 \/ ("settle_done" \in a /\ ~landed)))
          /\ net' = net0 \cup (IF a \cap {"announce", "enter_announced"} # {} THEN {"blocks"} ELSE {})
                         \cup (IF "grant" \in a THEN {"granted"} ELSE {})
                         \cup (IF a \cap {"send_abort", "say_stop", "enter_fencing"} # {} THEN {"abort"} ELSE {})
                         \cup (IF a \cap {"send_release", "acknowledge", "enter_releasing"} # {} THEN {"release"} ELSE {})

P(ev) == FireP(ev, please, comp, net) /\ UNCHANGED <<dvars, comp, landed>>
D(ev) == FireD(ev, granted, net) /\ UNCHANGED <<pvars, comp, landed>>

\* vLLM
Start == ~req /\ P("cmd_offer")
Progress == /\ req /\ ~handed /\ ~comp /\ comp' = TRUE
            /\ FireP("cmd_progress", please, TRUE, net) /\ UNCHANGED <<dvars, landed>>
Finish == req /\ ~handed /\ comp /\ P("cmd_finish")
Abort == req /\ ~handed /\ P("cmd_abort")
Load == load = 0 /\ D("cmd_load")
DAbort == load # 0 /\ D("cmd_abort")
\* the transport
Ok == /\ pend > 0 /\ landed' = TRUE
      /\ FireP("cq_done", please, comp, net) /\ UNCHANGED <<dvars, comp>>
Err == pend > 0 /\ P("cq_failed")
\* timers
PTimer(ev) == POf(ev, p) # {} /\ P(ev)
DTimer(ev) == DOf(ev, d) # {} /\ D(ev)
Stuck == pend > 0 /\ PTimer("due_stuck")
Expire == p = "OFFERED" /\ P("due_lease")
Lapse == /\ please
         /\ IF POf("due_lease", p) # {} THEN FireP("due_lease", FALSE, comp, net) /\ UNCHANGED <<dvars, comp, landed>>
            ELSE please' = FALSE /\ UNCHANGED <<p, pend, posted, req, handed, pset, failed, quiet, dvars, comp, landed, bad, net>>
DLease == /\ ~please /\ DOf("due_lease", d) # {}
          /\ FireD("due_lease", FALSE, net \ {"granted"}) /\ UNCHANGED <<pvars, comp, landed>>
\* the network
Deliver(m) == /\ m \in net
              /\ CASE m = "blocks" -> P("recv_blocks") [] m = "granted" -> P("recv_granted")
                   [] m = "release" -> P("recv_release") [] m = "abort" -> P("recv_abort")
                   [] m = "claim" -> D("recv_claim") [] m = "done" -> D("recv_done")
                   [] m = "failed" -> D("recv_failed") [] m = "released" -> D("recv_released")
Messages == {"blocks", "granted", "release", "abort", "claim", "done", "failed", "released"}

Next == \/ Start \/ Progress \/ Finish \/ Abort \/ Load \/ DAbort \/ Ok \/ Err
        \/ PTimer("due_retry") \/ PTimer("due_deadline") \/ PTimer("due_drain") \/ Stuck \/ Expire \/ Lapse
        \/ DTimer("due_retry") \/ DTimer("due_deadline") \/ DLease
        \/ \E m \in Messages : Deliver(m)
\* No message is fair: the network may stay silent for ever, and both sides come to their end all the same.
Fair == /\ WF_vars(Progress) /\ WF_vars(Finish) /\ WF_vars(Ok \/ Err) /\ WF_vars(PTimer("due_deadline"))
        /\ WF_vars(Expire) /\ WF_vars(Lapse) /\ WF_vars(DTimer("due_deadline")) /\ WF_vars(DLease)
Spec == Init /\ [][Next]_vars
FairSpec == Spec /\ Fair

Safe == ~bad /\ (pend > 0 /\ please => load = 1)
Done == p \in {"NEW", "FREED"} /\ d \in {"NEW", "CLOSED"} /\ (req => pset) /\ load # 1
Finishes == []<>Done
Absorbs == [][(pset => pset') /\ (load = 2 => load' = 2) /\ (d = "CLOSED" => d' = "CLOSED") /\ (p = "FREED" => p' = "FREED")]_vars
====
