//! The model of the example's recorded conversation: says what a careful model would, from what the tools returned.
//!
//! It speaks as much of the chat completions API as agentd asks for, on a port of the loopback interface, for one daemon.

use std::net::{TcpListener, TcpStream};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::chat::{self, calls};

/// Serves one conversation; hand it a client's requests one after the other.
pub(crate) struct ScriptedModel {
    listener: TcpListener,
}

impl ScriptedModel {
    /// Listens on a free port.
    pub(crate) fn listen() -> Result<Self> {
        Ok(Self { listener: TcpListener::bind("127.0.0.1:0").context("listening on the loopback interface")? })
    }

    /// The base URL to configure.
    pub(crate) fn base_url(&self) -> Result<String> {
        Ok(format!("http://{}/v1", self.listener.local_addr()?))
    }

    /// Answers requests until this program ends. A request that breaks off is its client's affair.
    pub(crate) fn serve(self) {
        std::thread::spawn(move || {
            for stream in self.listener.incoming().flatten() {
                if let Err(error) = answer(&stream) {
                    eprintln!("the scripted model could not answer: {error:#}");
                }
            }
        });
    }
}

fn answer(stream: &TcpStream) -> Result<()> {
    let request = chat::read_request(stream)?;
    let messages = request["messages"].as_array().context("the request has no messages")?;
    chat::write_answer(stream, &reply(messages)?)
}

/// What the model says next: it depends on how many results it has seen.
fn reply(messages: &[Value]) -> Result<Value> {
    let goal = messages.iter().find(|message| message["role"] == "user").context("there is no goal")?;
    let quarter = quarter(goal["content"].as_str().unwrap_or_default())?;
    let results = results(messages)?;
    let archive = format!("bird-strikes-{quarter}.zip");
    Ok(match results.as_slice() {
        [] => calls(
            "First the figures of the quarter and of the same quarter a year earlier.",
            &[
                ("quarter_figures", json!({"quarter": quarter, "source": "birdstrikes.csv"})),
                ("quarter_figures", json!({"quarter": year_before(&quarter)?, "source": "birdstrikes.csv"})),
            ],
        ),
        [now, before] => calls(
            "Now the report.",
            &[("render_report", json!({"figures": now, "earlier": before, "summary": summary(now, before)}))],
        ),
        [_, _, _] => calls(
            "The report is written; next the archive.",
            &[("pack_report", json!({"folder": "report", "archive": archive}))],
        ),
        [_, _, _, _] => calls(
            "Last a check of everything against the records.",
            &[("check_report", json!({"quarter": quarter, "source": "birdstrikes.csv", "archive": archive}))],
        ),
        [now, before, _, packed, checked] if checked["passed"] == true => {
            let answer = json!({
                "quarter": quarter,
                "strikes": now["strikes"],
                "damaging": now["damaging"],
                "cost_usd": now["cost_usd"],
                "summary": summary(now, before),
                "files": {
                    "report": "report/report.html",
                    "chart": "report/chart.svg",
                    "figures": "report/figures.json",
                    "archive": archive,
                },
                "archive_sha256": packed["sha256"],
            });
            json!({"role": "assistant", "content": answer.to_string()})
        }
        other => bail!("the script has no answer to {} results, the last of them {:?}", other.len(), other.last()),
    })
}

/// The results of the calls, in their order. A call that failed ends the recording.
fn results(messages: &[Value]) -> Result<Vec<Value>> {
    let tools = messages.iter().filter(|message| message["role"] == "tool");
    tools
        .map(|message| {
            let text = message["content"].as_str().context("a result is no text")?;
            let content: Value = serde_json::from_str(text).with_context(|| format!("a result is not JSON: {text}"))?;
            if content["ok"] == false {
                bail!("a call failed: {content}");
            }
            Ok(content.get("result").cloned().unwrap_or(content))
        })
        .collect()
}

fn quarter(goal: &str) -> Result<String> {
    let at = goal.find("-Q").filter(|at| *at >= 4).context("the goal names no quarter")?;
    Ok(goal.get(at - 4..at + 3).context("the goal names no quarter")?.to_owned())
}

fn year_before(quarter: &str) -> Result<String> {
    let (year, rest) = quarter.split_at(4);
    Ok(format!("{}{rest}", year.parse::<u32>()? - 1))
}

fn summary(now: &Value, before: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!(
        "{} wildlife strikes were reported in {}, against {} in {}; {} of them did damage, against {}. The reported costs come to {} \
         dollars. {} leads the identified species.",
        now["strikes"],
        text(&now["quarter"]),
        before["strikes"],
        text(&before["quarter"]),
        now["damaging"],
        before["damaging"],
        now["cost_usd"],
        text(&now["species"][0]["name"]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(results: &[Value]) -> Vec<Value> {
        let goal = json!({"role": "user", "content": "Goal: {\"quarter\":\"2000-Q3\"}"});
        let result =
            |result: &Value| json!({"role": "tool", "content": json!({"ok": true, "result": result}).to_string()});
        std::iter::once(goal).chain(results.iter().map(result)).collect()
    }

    #[test]
    fn it_asks_for_the_quarter_and_the_year_before() {
        let message = reply(&told(&[])).unwrap();
        let arguments =
            |index: usize| message["tool_calls"][index]["function"]["arguments"].as_str().unwrap().to_owned();
        assert!(arguments(0).contains("2000-Q3") && arguments(1).contains("1999-Q3"), "{message}");
    }

    #[test]
    fn it_does_not_answer_when_the_check_found_faults() {
        let results = |passed: bool| {
            let figures = json!({"quarter": "2000-Q3", "strikes": 2, "species": [{"name": "Killdeer"}]});
            [figures.clone(), figures, json!({}), json!({"sha256": "00"}), json!({"passed": passed})]
        };
        assert!(reply(&told(&results(true))).unwrap()["content"].as_str().unwrap().contains("archive_sha256"));
        assert!(reply(&told(&results(false))).is_err());
    }
}
