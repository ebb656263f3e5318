//! A job's conversation, and beside each message how large it is. A message is written as JSON to be measured, so that is done once,
//! when it enters, and not whenever it is decided what goes on.

use std::ops::Deref;

use crate::model::transcript::Message;

/// The messages so far, without the system prompt. Read as a slice.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Conversation {
    messages: Vec<Message>,
    /// Of each message.
    tokens: Vec<u64>,
}

impl Conversation {
    pub(super) const fn new() -> Self {
        Self { messages: Vec::new(), tokens: Vec::new() }
    }

    pub(super) fn push(&mut self, message: Message) {
        self.tokens.push(message.estimated_tokens());
        self.messages.push(message);
    }

    pub(super) fn extend(&mut self, messages: impl IntoIterator<Item = Message>) {
        messages.into_iter().for_each(|message| self.push(message));
    }

    /// Keeps so many.
    pub(super) fn truncate(&mut self, length: usize) {
        self.messages.truncate(length);
        self.tokens.truncate(length);
    }

    /// Changes whatever is to be changed, and measures it anew.
    pub(super) fn rewrite<T>(&mut self, change: impl FnOnce(&mut Vec<Message>) -> T) -> T {
        let changed = change(&mut self.messages);
        self.tokens = self.messages.iter().map(Message::estimated_tokens).collect();
        changed
    }

    /// Roughly how many tokens all from this message on have.
    pub(super) fn tokens_from(&self, first: usize) -> u64 {
        self.tokens.iter().skip(first).copied().fold(0, u64::saturating_add)
    }
}

impl Deref for Conversation {
    type Target = [Message];

    fn deref(&self) -> &[Message] {
        &self.messages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_messages_through_every_change() {
        let message = |text: &str| Message::User(text.repeat(30));
        let measured = |conversation: &Conversation| {
            for first in 0..=conversation.len() {
                let anew = conversation[first..].iter().map(Message::estimated_tokens).sum::<u64>();
                assert_eq!(conversation.tokens_from(first), anew, "from {first}");
            }
        };
        let mut conversation = Conversation::new();
        conversation.push(message("a"));
        conversation.extend([message("bb"), message("ccc"), message("dddd")]);
        measured(&conversation);
        conversation.rewrite(|messages| {
            messages.remove(1);
            messages[1] = message("e");
        });
        measured(&conversation);
        conversation.truncate(2);
        measured(&conversation);
        assert_eq!(*conversation, [message("a"), message("e")]);
    }
}
