//! Calls that an earlier agentd had ordered, and that have no end. What becomes of one follows from what is known of it, not from
//! what may be guessed:
//!
//! | the call | what is known | what becomes of it |
//! |---|---|---|
//! | any | the launcher noted no start of it: nothing ran | it is run, as if it were new |
//! | changes nothing, may be repeated, or writes into a layer that is thrown away without a receipt | it left nothing | it is run again |
//! | any other | it may have had effects, some or all | it is not repeated, and the model is told so |
//!
//! A call whose changes were committed has its receipt in the ledger, and with it its end.

use toolproto::code::Code;
use toolproto::ids::CallId;

use super::decide::Action;
use super::event::{Event, Refusal};
use super::{BatchCall, Progress, Session};

/// What becomes of a call that may have run when an earlier agentd ended. Its receipt is not in the ledger, so what it wrote into
/// a layer was thrown away before any job went on; what it may have done elsewhere is not known.
pub(super) fn resolve(one: &BatchCall) -> Action {
    if one.planned.repeatable {
        return Action::Append(Box::new(Event::CallReset { call: one.planned.call }));
    }
    unknown_effects(one)
}

/// The result that says that a call may have had effects.
pub(super) fn unknown_effects(one: &BatchCall) -> Action {
    let call = one.planned.call;
    let message =
        "agentd ended while the call ran. It may have had effects, and was not repeated: look before you call again";
    Action::Refuse { call, refusal: Refusal { code: Code::Interrupted, message: message.to_owned() } }
}

impl Session {
    /// The calls, of tools and an extension, that were ordered and have no end. When agentd ends, each of them may have run, unless
    /// the launcher knows that it never started.
    #[must_use]
    pub fn without_end(&self) -> Vec<CallId> {
        let open = self.batch.iter().filter(|one| is_open(one));
        open.map(|one| one.planned.call).chain(self.consulted().map(|consulted| consulted.call)).collect()
    }

    /// Nothing that had been ordered goes on any more. What never started is as it was before it was ordered.
    pub(super) fn dangle(&mut self, never_started: &[CallId]) {
        self.consultation.dangle(never_started);
        for call in self.batch.iter_mut().filter(|one| is_open(one)) {
            let never = never_started.contains(&call.planned.call);
            call.progress = if never { Progress::Pending } else { Progress::Dangling };
        }
    }
}

const fn is_open(one: &BatchCall) -> bool {
    matches!(one.progress, Progress::Started | Progress::Dangling)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use toolproto::extension::Point;
    use toolproto::ids::JobId;

    use super::*;
    use crate::agent::Agent;
    use crate::model::transcript::Arguments;
    use crate::scripted;
    use crate::session::decide::decide;
    use crate::session::event::{Interruption, Plan, PlannedCall, Spent};

    const FIRST: CallId = CallId::from_u128(1);
    const SECOND: CallId = CallId::from_u128(2);

    fn planned(call: CallId, repeatable: bool) -> PlannedCall {
        PlannedCall {
            call,
            wire_id: call.to_string(),
            tool: "read".to_owned(),
            arguments: Arguments::Object(json!({})),
            concurrent: true,
            approval: false,
            repeatable,
            outside_effects: !repeatable,
            question: false,
            built_in: None,
            refusal: None,
        }
    }

    fn fold(session: &mut Session, events: Vec<Event>) {
        for event in events {
            session.apply(&event, Duration::ZERO).unwrap();
        }
    }

    fn planning(agent: &Agent) -> Session {
        let mut session = Session::new();
        let (budget, workspace) = (agent.budget.clone(), None);
        let goal = Event::NewGoal { goal: json!({}), agent: agent.digest, budget, workspace, conversation: Vec::new() };
        fold(&mut session, vec![goal]);
        session
    }

    /// A job two of whose calls had been ordered when agentd ended. The launcher noted all starts but these.
    fn resumed(repeatable: bool, never_started: &[CallId]) -> Session {
        let mut session = planning(&scripted::agent());
        let calls = vec![planned(FIRST, repeatable), planned(SECOND, repeatable)];
        let plan = Plan { calls, spent: Spent::default(), ..Plan::default() };
        let started = [FIRST, SECOND].map(|call| Event::CallStarted { call });
        fold(&mut session, vec![Event::TurnBegun { turn: 1 }, Event::PlanReceived { plan }]);
        fold(&mut session, started.into());
        assert_eq!(session.without_end(), [FIRST, SECOND]);
        fold(&mut session, vec![Event::Resumed { never_started: never_started.to_vec() }]);
        session
    }

    fn decided(session: &Session) -> Vec<Action> {
        let (agent, tools) = (scripted::agent(), scripted::tools());
        decide(session, &agent, &tools, JobId::from_u128(1), Duration::ZERO)
    }

    fn runs(actions: &[Action]) -> Vec<CallId> {
        actions
            .iter()
            .filter_map(|action| if let Action::Run { call, .. } = action { Some(*call) } else { None })
            .collect()
    }

    #[test]
    fn what_never_started_is_run_whatever_it_does() {
        for repeatable in [true, false] {
            let session = resumed(repeatable, &[FIRST, SECOND]);
            assert_eq!(session.without_end(), []);
            assert_eq!(runs(&decided(&session)), [FIRST, SECOND]);
        }
    }

    #[test]
    fn what_may_have_run_is_run_again_only_where_it_left_nothing() {
        let mut session = resumed(true, &[SECOND]);
        assert_eq!(session.without_end(), [FIRST]);
        assert_eq!(decided(&session), [Action::Append(Box::new(Event::CallReset { call: FIRST }))]);
        fold(&mut session, vec![Event::CallReset { call: FIRST }]);
        assert_eq!(runs(&decided(&session)), [FIRST, SECOND]);

        let session = resumed(false, &[SECOND]);
        let actions = decided(&session);
        let [Action::Refuse { call: FIRST, refusal }] = actions.as_slice() else { panic!("{actions:?}") };
        assert_eq!(refusal.code, Code::Interrupted);
    }

    #[test]
    fn another_crash_makes_nothing_known_that_was_not() {
        let mut session = resumed(false, &[SECOND]);
        fold(&mut session, vec![Event::Resumed { never_started: Vec::new() }]);
        assert_eq!(session.without_end(), [FIRST]);
        let actions = decided(&session);
        assert!(matches!(actions.as_slice(), [Action::Refuse { call: FIRST, .. }]), "{actions:?}");
    }

    #[test]
    fn what_never_started_is_not_run_in_a_job_that_was_cancelled() {
        let mut session = resumed(false, &[FIRST, SECOND]);
        fold(&mut session, vec![Event::CancelRequested {}]);
        let cancelled = Action::Interrupt { cause: Interruption::Cancelled, calls: vec![FIRST, SECOND] };
        assert_eq!(decided(&session), [cancelled]);
    }

    #[test]
    fn an_extension_that_never_started_has_not_been_asked() {
        for (never_started, open) in [(vec![FIRST], vec![]), (vec![], vec![FIRST])] {
            let mut session = planning(&scripted::agent());
            let extension = "strict".to_owned();
            let asked = Event::ExtensionStarted { call: FIRST, extension, point: Point::BeforeTurn };
            fold(&mut session, vec![asked, Event::Resumed { never_started }]);
            assert_eq!(session.without_end(), open);
        }
    }
}
