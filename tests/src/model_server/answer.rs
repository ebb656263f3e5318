//! An answer about to be given: a turn of the script with its ids, cut into fragments.

use super::Format;
use super::script::{Quirk, Tokens, Turn};

/// What is put on the wire, in whichever format.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// The response's id, without the format's prefix.
    pub(super) id: String,
    pub(super) model: String,
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) calls: Vec<AnswerCall>,
    pub(super) usage: Tokens,
    /// Characters in a fragment.
    fragment: usize,
    pub(super) turn: Turn,
}

/// One call of an answer.
#[derive(Clone, Debug)]
pub(super) struct AnswerCall {
    /// Absent when the server forgets it.
    pub(super) id: Option<String>,
    pub(super) name: String,
    pub(super) arguments: String,
}

impl Answer {
    pub(super) fn new(turn: &Turn, number: u64, model: &str, format: Format, id_length: Option<usize>) -> Self {
        let empty = turn.has(Quirk::Empty);
        let calls = if empty { &[][..] } else { &turn.calls[..] };
        let calls = calls
            .iter()
            .enumerate()
            .map(|(index, call)| {
                let place = if turn.has(Quirk::SameIds) { 0 } else { index };
                let id = match &call.id {
                    _ if turn.has(Quirk::NoIds) => None,
                    _ if turn.has(Quirk::EmptyIds) => Some(String::new()),
                    Some(id) => Some(id.clone()),
                    None => Some(made_up_id(number, place, format, id_length)),
                };
                AnswerCall { id, name: call.name.clone(), arguments: call.argument_text() }
            })
            .collect();
        let text = if empty { String::new() } else { turn.text.clone() };
        let fragment = if turn.pace.fragment == 0 { 7 } else { turn.pace.fragment };
        Self {
            id: format!("scripted{number:04}"),
            model: model.to_owned(),
            reasoning: turn.reasoning.clone(),
            text,
            calls,
            usage: turn.usage,
            fragment,
            turn: turn.clone(),
        }
    }

    pub(super) fn has(&self, quirk: Quirk) -> bool {
        self.turn.has(quirk)
    }

    /// `text` in fragments, never empty ones, cut between characters.
    pub(super) fn fragments(&self, text: &str) -> Vec<String> {
        let characters: Vec<char> = text.chars().collect();
        characters.chunks(self.fragment).map(|part| part.iter().collect()).collect()
    }

    /// The fragments of one call's arguments.
    pub(super) fn argument_fragments(&self, call: &AnswerCall) -> Vec<String> {
        if self.has(Quirk::WholeCalls) { vec![call.arguments.clone()] } else { self.fragments(&call.arguments) }
    }

    /// The signature that only this server can make for this thinking.
    pub(super) fn signature(&self) -> String {
        sign(&self.reasoning)
    }
}

fn made_up_id(number: u64, place: usize, format: Format, id_length: Option<usize>) -> String {
    let plain = format!("s{number:03}c{place:02}");
    match (id_length, format) {
        (Some(length), _) => format!("{plain:0<length$}").chars().take(length).collect(),
        (None, Format::Messages) => format!("toolu_{plain}"),
        (None, _) => format!("call_{plain}"),
    }
}

/// Signs a text so that any changed byte shows.
pub(super) fn sign(text: &str) -> String {
    let key = blake3::derive_key("agentd scripted model server, thinking signatures", b"not a secret");
    blake3::keyed_hash(&key, text.as_bytes()).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_make_the_whole_again_and_keep_characters() {
        let mut turn = Turn::text("Käse größer — naïve 東京");
        turn.pace.fragment = 3;
        let answer = Answer::new(&turn, 1, "m", Format::Chat, None);
        let parts = answer.fragments(&answer.text);
        assert!(parts.iter().all(|part| (1..=3).contains(&part.chars().count())));
        assert_eq!(parts.concat(), answer.text);
    }

    #[test]
    fn made_up_ids_fit_the_dialect() {
        assert_eq!(made_up_id(12, 3, Format::Chat, Some(9)), "s012c0300");
        assert_ne!(made_up_id(1, 0, Format::Chat, Some(9)), made_up_id(1, 1, Format::Chat, Some(9)));
        assert_eq!(made_up_id(1, 0, Format::Messages, None), "toolu_s001c00");
    }
}
