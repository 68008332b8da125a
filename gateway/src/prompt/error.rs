//! Errors of reading a request, with their HTTP status.
//!
//! Not here: the JSON of the answer (`crate::answer`).

/// Why a request is refused before it is placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PromptError {
    /// Not JSON, or not UTF-8.
    #[error("the body is not JSON: {0}")]
    Json(String),
    /// JSON of an unexpected shape.
    #[error("{0}")]
    Shape(String),
    /// The chat template refuses the conversation.
    #[error("the chat template refuses these messages: {0}")]
    Template(String),
    /// Unknown model.
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// A field that separates prefix caches, in the request of a key.
    #[error(
        "`{0}` is not for callers with an API key: the tenant of the key sets it; remove it from the request"
    )]
    OwnSalt(&'static str),
    /// Longer than the model's context.
    #[error(
        "the prompt has {tokens} tokens, but the context of this model has {context}; send a shorter one"
    )]
    TooLong {
        /// Tokens of the prompt.
        tokens: u32,
        /// Tokens of the context.
        context: u32,
    },
    /// The prompt becomes more text than its model can read, or than the request may cause.
    #[error(
        "the prompt becomes more than {limit} bytes of text, which is the limit for this request and model; \
         send fewer or shorter messages, or a shorter prompt"
    )]
    TooMuchText {
        /// Limit in bytes.
        limit: usize,
    },
    /// More bytes than allowed.
    #[error("the body is longer than {limit} bytes, which is the limit here (gateway.openai.body_bytes_max)")]
    TooLarge {
        /// Limit in bytes.
        limit: usize,
    },
}

impl PromptError {
    /// The HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self {
            PromptError::UnknownModel(_) => 404,
            PromptError::TooLarge { .. } => 413,
            PromptError::Json(_)
            | PromptError::Shape(_)
            | PromptError::Template(_)
            | PromptError::OwnSalt(_)
            | PromptError::TooLong { .. }
            | PromptError::TooMuchText { .. } => 400,
        }
    }

    /// Error code in OpenAI's API; `None` if it has none for this error.
    pub(crate) fn code(&self) -> Option<&'static str> {
        match self {
            PromptError::UnknownModel(_) => Some("model_not_found"),
            PromptError::TooLong { .. } | PromptError::TooMuchText { .. } => Some("context_length_exceeded"),
            _ => None,
        }
    }
}
