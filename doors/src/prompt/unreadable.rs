//! Why a request cannot be read, and with which status it is answered.
//!
//! Not here: the JSON around it (`crate::openai::answer`).

/// Why a request is refused before anybody was asked where it runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreadable {
    /// No JSON, or not UTF-8.
    #[error("the body is no JSON: {0}")]
    Json(String),
    /// JSON of another shape.
    #[error("{0}")]
    Shape(String),
    /// The chat template refuses the conversation.
    #[error("the chat template refuses these messages: {0}")]
    Template(String),
    /// No such model.
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// Longer than the model's context.
    #[error(
        "the prompt has {tokens} tokens, and the context of this model has {context}; send a shorter one"
    )]
    TooLong {
        /// Tokens of the prompt.
        tokens: u32,
        /// Tokens of the context.
        context: u32,
    },
    /// More bytes than are taken.
    #[error("the body is longer than {limit} bytes, which is the limit here (doors.openai.body_bytes_max)")]
    TooLarge {
        /// Bytes that are taken.
        limit: usize,
    },
}

impl Unreadable {
    /// The HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Unreadable::UnknownModel(_) => 404,
            Unreadable::TooLarge { .. } => 413,
            Unreadable::Json(_)
            | Unreadable::Shape(_)
            | Unreadable::Template(_)
            | Unreadable::TooLong { .. } => 400,
        }
    }

    /// What OpenAI's clients find as `code`, where they look for one.
    pub(crate) fn code(&self) -> Option<&'static str> {
        match self {
            Unreadable::UnknownModel(_) => Some("model_not_found"),
            Unreadable::TooLong { .. } => Some("context_length_exceeded"),
            _ => None,
        }
    }
}
