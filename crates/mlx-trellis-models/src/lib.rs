//! Llama and Qwen3 language models in mlx-rs, each of whose linear layers may be dense, MLX affine or trellis-coded.
//!
//! [`Model::load`] reads a Hugging Face or MLX folder, strictly: a tensor that is missing, unknown, or of another shape
//! or type is an error. [`Tokenizer`] goes between text and tokens, [`Generation`] yields tokens.
//!
//! ```no_run
//! use mlx_trellis_models::{Generation, LoadOptions, Message, Model, Sampler, Tokenizer, stop_tokens};
//!
//! let folder = std::path::Path::new("SmolLM2-135M-Instruct");
//! let mut model = Model::load(folder, &LoadOptions::default())?;
//! let tokenizer = Tokenizer::load(folder)?;
//! let prompt = tokenizer.chat(&[Message::user("Explain what a trellis code is.")])?;
//! let stop = stop_tokens(folder, &tokenizer)?;
//! let mut text = tokenizer.stream();
//! for token in Generation::new(&mut model, &tokenizer.encode(&prompt, false)?, Sampler::greedy(), &stop, 48)? {
//!     print!("{}", text.push(token?)?);
//! }
//! println!("{}", text.finish()?);
//! # Ok::<(), mlx_trellis_models::Error>(())
//! ```

mod cache;
mod config;
mod error;
mod generate;
mod json;
mod load;
mod model;
mod rope;
mod text;

pub use cache::{KvCache, LayerCache};
pub use config::{Config, Family};
pub use error::Error;
pub use generate::{Generation, PREFILL_CHUNK, Sampler, Sampling};
pub use load::{LinearForm, LinearInfo, LoadOptions};
pub use model::{Attention, Decoder, Layer, Mlp, Model, Observer, Projection};
pub use rope::{Rope, RopeScaling};
pub use text::{Detokenizer, Message, Tokenizer, stop_tokens};
