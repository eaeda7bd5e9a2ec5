//! Keys and values of the tokens a model has seen.

use mlx_rs::error::Exception;
use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

/// Tokens by which a cache grows: one copy for this many tokens, and little memory for nothing.
const STEP: i32 = 256;

/// Keys and values of every layer, for one sequence.
#[derive(Debug, Clone, Default)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
}

impl KvCache {
    /// An empty cache of a model of so many layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![LayerCache::default(); layers] }
    }

    /// Tokens in it.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.len as usize)
    }

    /// Whether there are no tokens in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Computes what is pending, so that a graph does not grow with the tokens.
    ///
    /// # Errors
    /// An error of MLX's.
    pub fn eval(&self) -> Result<(), Exception> {
        eval(self.layers.iter().flat_map(|layer| layer.keys_values.iter()).flat_map(|(k, v)| [k, v]))
    }
}

/// Keys and values of one layer, for one sequence.
#[derive(Debug, Clone, Default)]
pub struct LayerCache {
    /// `[1, heads, capacity, head_dim]`, of which the first `len` are filled.
    keys_values: Option<(Array, Array)>,
    len: i32,
}

impl LayerCache {
    /// Position of the next token.
    pub fn offset(&self) -> i32 {
        self.len
    }

    /// Appends keys and values `[1, heads, n, head_dim]`, and returns all there are, `[1, heads, len, head_dim]`.
    ///
    /// # Errors
    /// An error of MLX's, such as keys of another shape than those before.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array), Exception> {
        let len = self.len + keys.dim(2);
        let (mut k, mut v) = match self.keys_values.take() {
            Some((k, v)) if len <= k.dim(2) => (k, v),
            old => {
                let capacity = (len + STEP - 1) / STEP * STEP;
                let (k, v) = old.unzip();
                (grown(k, self.len, capacity, keys)?, grown(v, self.len, capacity, values)?)
            }
        };
        k.try_index_mut((.., .., self.len..len, ..), keys)?;
        v.try_index_mut((.., .., self.len..len, ..), values)?;
        let all = (k.try_index((.., .., ..len, ..))?, v.try_index((.., .., ..len, ..))?);
        self.keys_values = Some((k, v));
        self.len = len;
        Ok(all)
    }
}

/// The first `len` tokens of a buffer, with room up to `capacity`; shape and dtype as `like`.
fn grown(old: Option<Array>, len: i32, capacity: i32, like: &Array) -> Result<Array, Exception> {
    let room = |n: i32, dtype: Dtype| zeros_dtype(&[like.dim(0), like.dim(1), n, like.dim(3)], dtype);
    match old {
        None => room(capacity, like.dtype()),
        Some(old) => {
            concatenate(&[old.try_index((.., .., ..len, ..))?, room(capacity - len, old.dtype())?], 2)
        }
    }
}
