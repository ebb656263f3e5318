//! What a job may use, and what is left of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use toolproto::code::Code;
use toolproto::job::BudgetRequest;

/// What a job may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Model turns.
    pub max_turns: u32,
    /// Tool calls.
    pub max_tool_calls: u32,
    /// Time that the job may run. The time during which agentd does not run is not counted, that of a suspended machine is.
    pub wall: Duration,
    /// Tokens read and written.
    #[serde(default)]
    pub max_total_tokens: Option<u64>,
    /// US dollars.
    #[serde(default)]
    pub max_cost_usd: Option<f64>,
    /// Processor time of the calls.
    #[serde(default)]
    pub max_cpu: Option<Duration>,
}

/// A job asks for what it cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("budget.{field} {reason}")]
pub struct BudgetError {
    /// The field's name.
    pub field: &'static str,
    /// Why not.
    pub reason: String,
}

/// What a job has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// Model turns, begun ones included.
    pub turns: u32,
    /// Tool calls, reserved ones included.
    pub tool_calls: u32,
    /// Tokens read by models.
    pub input_tokens: u64,
    /// Tokens written by models.
    pub output_tokens: u64,
    /// US dollars.
    pub cost_usd: f64,
    /// Processor time of the calls that ended.
    pub cpu: Duration,
}

impl Budget {
    /// The budget of a job that asks for less.
    ///
    /// # Errors
    /// When it asks for more, or for nothing at all.
    pub fn narrowed(&self, asked: &BudgetRequest) -> Result<Self, BudgetError> {
        let wall_seconds = self.wall.as_secs();
        let cpu_seconds = self.max_cpu.map(|cpu| cpu.as_secs());
        Ok(Self {
            max_turns: narrow("max_turns", Some(self.max_turns), asked.max_turns)?.unwrap_or(self.max_turns),
            max_tool_calls: narrow("max_tool_calls", Some(self.max_tool_calls), asked.max_tool_calls)?
                .unwrap_or(self.max_tool_calls),
            wall: narrow("wall_seconds", Some(wall_seconds), asked.wall_seconds)?
                .map_or(self.wall, Duration::from_secs),
            max_total_tokens: narrow("max_total_tokens", self.max_total_tokens, asked.max_total_tokens)?,
            max_cost_usd: narrow("max_cost_usd", self.max_cost_usd, asked.max_cost_usd)?,
            max_cpu: narrow("max_cpu_seconds", cpu_seconds, asked.max_cpu_seconds)?.map(Duration::from_secs),
        })
    }

    /// How many calls are left.
    #[must_use]
    pub const fn calls_left(&self, used: &Used) -> u32 {
        self.max_tool_calls.saturating_sub(used.tool_calls)
    }

    /// How many tokens are left; `None` without a limit.
    #[must_use]
    pub fn tokens_left(&self, used: &Used) -> Option<u64> {
        self.max_total_tokens.map(|max| max.saturating_sub(used.input_tokens.saturating_add(used.output_tokens)))
    }

    /// The budget that allows no further turn, other than time. `estimate` is what the next request will read.
    #[must_use]
    pub fn exhausted(&self, used: &Used, need: &Need) -> Option<Code> {
        if used.turns >= self.max_turns {
            Some(Code::TurnBudgetExhausted)
        } else if !self.affords_tokens(used, need) {
            Some(Code::TokenBudgetExhausted)
        } else if !self.affords_cost(used, need) {
            Some(Code::CostBudgetExhausted)
        } else if self.max_cpu.is_some_and(|max| used.cpu >= max) {
            Some(Code::CpuBudgetExhausted)
        } else {
            None
        }
    }

    /// Whether the tokens that are left suffice.
    #[must_use]
    pub fn affords_tokens(&self, used: &Used, need: &Need) -> bool {
        self.tokens_left(used).is_none_or(|left| left >= need.tokens)
    }

    /// Whether the money that is left suffices.
    #[must_use]
    pub fn affords_cost(&self, used: &Used, need: &Need) -> bool {
        self.max_cost_usd.is_none_or(|max| used.cost_usd < max && used.cost_usd + need.cost_usd <= max)
    }

    /// What is left, in words, for the model.
    #[must_use]
    pub fn note(&self, used: &Used, elapsed: Duration) -> String {
        let mut parts = vec![
            format!("{} turns", self.max_turns.saturating_sub(used.turns)),
            format!("{} tool calls", self.calls_left(used)),
            format!("{} s", self.wall.saturating_sub(elapsed).as_secs()),
        ];
        parts.extend(self.tokens_left(used).map(|left| format!("{left} tokens")));
        parts.extend(self.max_cost_usd.map(|max| format!("{:.4} USD", (max - used.cost_usd).max(0.0))));
        parts.extend(self.max_cpu.map(|max| format!("{} CPU seconds", max.saturating_sub(used.cpu).as_secs())));
        format!("[budget left after this turn: {}]", parts.join(", "))
    }
}

/// What the next request needs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// Tokens.
    pub tokens: u64,
    /// US dollars.
    pub cost_usd: f64,
}

fn narrow<T: PartialOrd + Copy + std::fmt::Display + Default>(
    field: &'static str,
    ceiling: Option<T>,
    asked: Option<T>,
) -> Result<Option<T>, BudgetError> {
    let Some(asked) = asked else { return Ok(ceiling) };
    // Written so that NaN is refused too.
    if asked.partial_cmp(&T::default()) != Some(std::cmp::Ordering::Greater) {
        return Err(BudgetError { field, reason: "must be more than nothing".to_owned() });
    }
    match ceiling {
        Some(ceiling) if asked > ceiling => Err(BudgetError {
            field,
            reason: format!("asks for {asked}; the agent allows {ceiling}, and a job can only narrow it"),
        }),
        _ => Ok(Some(asked)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> Budget {
        Budget {
            max_turns: 30,
            max_tool_calls: 100,
            wall: Duration::from_secs(900),
            max_total_tokens: None,
            max_cost_usd: Some(1.0),
            max_cpu: None,
        }
    }

    #[test]
    fn a_job_narrows_and_never_widens() {
        let asked = BudgetRequest { max_turns: Some(3), max_total_tokens: Some(5000), ..BudgetRequest::default() };
        let narrowed = budget().narrowed(&asked).unwrap();
        assert_eq!((narrowed.max_turns, narrowed.max_tool_calls), (3, 100));
        assert_eq!(narrowed.max_total_tokens, Some(5000));
        for asked in [
            BudgetRequest { max_turns: Some(31), ..BudgetRequest::default() },
            BudgetRequest { max_turns: Some(0), ..BudgetRequest::default() },
            BudgetRequest { max_cost_usd: Some(1.5), ..BudgetRequest::default() },
            BudgetRequest { max_cost_usd: Some(f64::NAN), ..BudgetRequest::default() },
            BudgetRequest { max_cost_usd: Some(-1.0), ..BudgetRequest::default() },
        ] {
            assert!(budget().narrowed(&asked).is_err(), "{asked:?}");
        }
    }

    #[test]
    fn each_budget_has_its_code() {
        let budget = Budget { max_total_tokens: Some(100), max_cpu: Some(Duration::from_secs(1)), ..budget() };
        let need = Need { tokens: 10, cost_usd: 0.1 };
        let code = |used: Used| budget.exhausted(&used, &need);
        assert_eq!(code(Used::default()), None);
        assert_eq!(code(Used { turns: 30, ..Used::default() }), Some(Code::TurnBudgetExhausted));
        assert_eq!(
            code(Used { input_tokens: 60, output_tokens: 31, ..Used::default() }),
            Some(Code::TokenBudgetExhausted)
        );
        assert_eq!(code(Used { cost_usd: 0.95, ..Used::default() }), Some(Code::CostBudgetExhausted));
        assert_eq!(code(Used { cpu: Duration::from_secs(1), ..Used::default() }), Some(Code::CpuBudgetExhausted));
    }
}
