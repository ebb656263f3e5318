//! What extensions can do to a job, and what they cannot.

use super::*;

/// An office whose agent has these extensions.
async fn watched(extensions: &[&str], behaviours: &[(&str, Behaviour)], replies: Vec<Reply1>) -> Office {
    let extensions = extensions.iter().map(|name| (*name).to_owned()).collect();
    Office::with(Agent { extensions, ..agent() }, behaviours, replies).await
}

/// What the model was told in its last request.
fn told(office: &Office) -> String {
    format!("{:?}", office.model.asked.lock().unwrap().last().unwrap().transcript.messages)
}

#[tokio::test(start_paused = true)]
async fn what_an_extension_says_is_heard_and_has_a_receipt_of_its_own() {
    let feedback = json!({"feedback": "mind the units", "disable_tools": ["write"]});
    // What is no answer at the end fails there, and is passed over.
    let office = watched(
        &["guard"],
        &[("guard", answers(feedback)), ("read", answers(json!({})))],
        vec![calls(&[("read", json!({}))]), says("{\"done\":true}")],
    )
    .await;
    let job = office.submit(request()).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(result.verdict, Verdict::Success { data: json!({"done": true}) });
    assert_eq!(result.usage.tool_calls, 1, "an extension's call is none of the model's");
    assert!(
        told(&office).contains("`guard`, which watches over this job, says:\\nmind the units"),
        "{}",
        told(&office)
    );
    let offered = office.model.asked.lock().unwrap()[1].tools.clone();
    assert!(offered.iter().all(|tool| tool.name != "write"), "{offered:?}");
    let receipts = office.dispatcher.receipts(&caller(), job).await.unwrap();
    let names: Vec<String> =
        receipts[..receipts.len() - 1].iter().map(|one| one.receipt().unwrap().tool.name).collect();
    let guard = "extension:guard".to_owned();
    // Before two turns, after one batch, before the answer; what is told after the run has none.
    assert_eq!(names, [guard.clone(), "read".to_owned(), guard.clone(), guard.clone(), guard]);
    assert_eq!(result.receipts.count, 5);
    let first = receipts[0].receipt().unwrap();
    assert_eq!((first.notes[0].as_str(), first.semantics.declared.as_str()), ("operation before_turn", "read_only"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_an_extension_switched_off_is_refused() {
    let office = watched(
        &["guard"],
        &[("guard", answers(json!({"disable_tools": ["read"]}))), ("read", answers(json!({})))],
        vec![calls(&[("read", json!({}))]), says("{\"done\":true}")],
    )
    .await;
    office.run().await;
    assert!(told(&office).contains("switched off"), "{}", told(&office));
    assert!(!office.launch.log.lock().unwrap().launched.contains(&"read".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn an_objection_sends_the_answer_back_a_bounded_number_of_times() {
    let objects = json!({"continue_loop": true, "feedback": "count again"});
    let office = watched(
        &["guard"],
        &[("guard", answers(objects))],
        vec![says("{\"done\":1}"), says("{\"done\":2}"), says("{\"done\":3}")],
    )
    .await;
    let result = office.run().await;
    let (code, message, _, partial) = failed(&result);
    assert_eq!(code, Code::CompletionUnverified);
    assert!(message.contains("count again"), "{message}");
    assert_eq!(partial, Some(&json!({"done": 3})));
}

#[tokio::test(start_paused = true)]
async fn an_answer_put_in_place_of_the_models_is_judged_like_it() {
    for (answer, verdict) in [(json!({"done": "mended"}), true), (json!({"undone": 1}), false)] {
        let replaces = json!({"replacement_content": answer});
        let replies = vec![says("{}"), says("{}"), says("{}")];
        let office = watched(&["guard"], &[("guard", answers(replaces))], replies).await;
        let result = office.run().await;
        match verdict {
            true => assert_eq!(result.verdict, Verdict::Success { data: answer }),
            false => assert_eq!(failed(&result).0, Code::ResultInvalid),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_extension_may_end_the_job() {
    let stops = json!({"failure": {"message": "this goal is not for us"}});
    let office = watched(&["guard"], &[("guard", answers(stops))], vec![says("{\"done\":true}")]).await;
    let result = office.run().await;
    let (code, message, details, _) = failed(&result);
    assert_eq!((code, details), (Code::ExtensionRefused, &json!({"extension": "guard"})));
    assert!(message.contains("this goal is not for us"));
    assert!(office.model.asked.lock().unwrap().is_empty(), "the model was asked all the same");
}

#[tokio::test(start_paused = true)]
async fn a_failing_extension_is_passed_over_unless_it_is_required() {
    for (name, code) in [("guard", None), ("strict", Some(Code::ExtensionFailed))] {
        for behaviour in [Behaviour::Hangs, Behaviour::Fails("NO"), answers(json!({"call_tool": "read"}))] {
            let office = watched(&[name], &[(name, behaviour)], vec![says("{\"done\":true}")]).await;
            let result = office.run().await;
            match code {
                None => assert_eq!(result.verdict, Verdict::Success { data: json!({"done": true}) }),
                Some(code) => assert_eq!(failed(&result).0, code),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_those_who_are_told_of_the_end() {
    // Everything else of it takes no time: it hangs each time until its own is over.
    let office = watched(&["guard"], &[("guard", Behaviour::Hangs)], vec![says("{\"done\":true}")]).await;
    let job = office.submit(request()).await.unwrap();
    office.result(job).await;
    let is_closed = || office.launch.log.lock().unwrap().closed.contains(&job);
    assert!(!is_closed(), "the grant is gone before the observers were told");
    while !is_closed() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let launched = office.launch.log.lock().unwrap().launched.len();
    assert_eq!(launched, 3, "before the turn, before the answer, after the run");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_job_ends_its_extension() {
    let office = watched(&["strict"], &[("strict", Behaviour::Hangs)], vec![says("{\"done\":true}")]).await;
    let job = office.submit(request()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    office.dispatcher.cancel(&caller(), job).await.unwrap();
    let result = office.result(job).await;
    assert_eq!(failed(&result).0, Code::Cancelled);
    assert_eq!(result.receipts.count, 1, "the extension that was ended has its receipt");
}
