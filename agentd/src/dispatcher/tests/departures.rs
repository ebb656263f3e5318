//! Whoever asks for a change may go away in its middle: it is made to its end, and nothing stays behind.

use tokio::sync::Semaphore;

use super::*;
use crate::model::ModelError;

impl Office {
    /// Begins `ask`, and drops it once the launcher has granted a job that nobody was told of yet. Yields that job.
    async fn left_while_it_is_granted(&self, ask: impl Future<Output = ()> + Send + 'static) -> JobId {
        let telling = Arc::new(Semaphore::new(0));
        let before = {
            let mut log = self.launch.log.lock().unwrap();
            log.telling = Some(Arc::clone(&telling));
            log.granted.len()
        };
        let asking = tokio::spawn(ask);
        let granted = || self.launch.log.lock().unwrap().granted.get(before).copied();
        until("nothing was granted", || granted().is_some()).await;
        asking.abort();
        assert!(asking.await.is_err_and(|error| error.is_cancelled()), "it did not wait for the grant");
        self.launch.log.lock().unwrap().telling = None;
        telling.add_permits(1);
        granted().unwrap()
    }

    fn is_closed(&self, job: JobId) -> bool {
        self.launch.log.lock().unwrap().closed.contains(&job)
    }
}

async fn until(otherwise: &str, condition: impl Fn() -> bool) {
    let patience = std::time::Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(std::time::Instant::now() < patience, "{otherwise}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_call_whose_caller_left_while_it_was_granted_gets_its_receipt_and_is_closed() {
    let office = Office::open(&[("hang", Behaviour::Hangs)], Vec::new()).await;
    let request =
        CallRequest { version: 1, tool: "hang".to_owned(), arguments: json!({}), workspace: None, timeout_ms: None };
    let dispatcher = office.dispatcher.clone();
    let ask = async move { drop(dispatcher.call(&caller(), client(), request).await) };
    let job = office.left_while_it_is_granted(ask).await;
    until("its grant is left", || office.is_closed(job)).await;
    assert_eq!(office.dispatcher.job(&caller(), job).await.unwrap().state, JobState::Done);
    let receipts = office.dispatcher.receipts(&caller(), job).await.unwrap();
    assert_eq!(receipts[0].receipt().unwrap().outcome.code, Some(Code::Cancelled));
}

#[tokio::test]
async fn a_command_whose_caller_left_while_it_was_granted_is_closed() {
    let office = Office::open(&[], Vec::new()).await;
    let request: ExecRequest =
        serde_json::from_value(json!({"version": 1, "policy": "strict", "command": ["true"]})).unwrap();
    let dispatcher = office.dispatcher.clone();
    let ask = async move {
        let (_tell, said) = oneshot::channel();
        let stdio = [client(), client(), client()];
        let stop = tokio_util::sync::CancellationToken::new();
        drop(dispatcher.exec(&caller(), client(), request, stdio, said, stop).await);
    };
    let job = office.left_while_it_is_granted(ask).await;
    until("its grant is left", || office.is_closed(job)).await;
    assert_eq!(office.dispatcher.job(&caller(), job).await.unwrap().state, JobState::Done);
}

#[tokio::test]
async fn a_job_whose_submitter_left_while_it_was_granted_runs_and_is_closed() {
    let office = Office::open(&[], vec![says("{\"done\":1}")]).await;
    let dispatcher = office.dispatcher.clone();
    let ask = async move { drop(dispatcher.submit(&caller(), client(), request()).await) };
    let job = office.left_while_it_is_granted(ask).await;
    until("its grant is left", || office.is_closed(job)).await;
    assert_eq!(office.result(job).await.verdict, Verdict::Success { data: json!({"done": 1}) });
}

#[tokio::test]
async fn a_job_is_gone_on_with_though_whoever_asked_for_that_left_while_it_was_granted() {
    let gone = ModelError::lasting(Code::ModelUnavailable, "no answer");
    let office = Office::open(&[], vec![Err(gone), says("{\"done\":1}")]).await;
    let job = office.submit(request()).await.unwrap();
    assert_eq!(failed(&office.result(job).await).0, Code::ModelUnavailable);
    until("its grant is left", || office.is_closed(job)).await;
    let dispatcher = office.dispatcher.clone();
    let ask = async move { drop(dispatcher.resume(&caller(), job).await) };
    assert_eq!(office.left_while_it_is_granted(ask).await, job);
    let twice = || office.launch.log.lock().unwrap().closed.iter().filter(|closed| **closed == job).count() == 2;
    until("its grant is left", twice).await;
    assert_eq!(office.result(job).await.verdict, Verdict::Success { data: json!({"done": 1}) });
}
