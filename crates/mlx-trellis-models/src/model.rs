//! The decoder: one code for both families, every linear layer in whichever form the folder has it.

use mlx_macros::ModuleParameters;
use mlx_rs::error::Exception;
use mlx_rs::fast::{ScaledDotProductAttentionMask, scaled_dot_product_attention};
use mlx_rs::module::{Module, Param};
use mlx_rs::nn::{Embedding, Linear, RmsNorm, silu};
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::quantization::MaybeQuantized;
use mlx_rs::{Array, Dtype};
use mlx_trellis::MaybeTrellis;

use crate::cache::{KvCache, LayerCache};
use crate::config::Config;
use crate::error::Error;
use crate::load::LinearInfo;
use crate::rope::Rope;

/// A linear layer: dense, MLX affine or trellis-coded.
pub type Projection = MaybeTrellis<MaybeQuantized<Linear>>;

/// Is shown what a layer's linear modules are given, as it happens: calibration collects statistics this way.
pub trait Observer {
    /// `x [1, tokens, in_features]` is about to go into each of `modules`, named from their layer, such as
    /// `self_attn.q_proj`. It is lazy; evaluating it here is allowed.
    ///
    /// # Errors
    /// Whatever it returns ends the forward pass.
    fn inputs(&mut self, modules: &[&'static str], x: &Array) -> Result<(), Exception>;
}

/// A language model: a decoder, and a projection from its features to logits.
#[derive(Debug, Clone, ModuleParameters)]
pub struct Model {
    /// The decoder.
    #[param]
    pub model: Decoder,
    /// The output projection `[vocab_size, hidden_size]`; `None` where it is the embedding.
    #[param]
    pub lm_head: Option<Projection>,
    pub(crate) config: Config,
    pub(crate) linears: Vec<LinearInfo>,
}

/// The decoder of a language model.
#[derive(Debug, Clone, ModuleParameters)]
pub struct Decoder {
    /// Token embedding `[vocab_size, hidden_size]`, dense or MLX affine.
    #[param]
    pub embed_tokens: MaybeQuantized<Embedding>,
    /// The layers, in order.
    #[param]
    pub layers: Vec<Layer>,
    /// The norm after the last one.
    #[param]
    pub norm: RmsNorm,
    pub(crate) rope: Rope,
}

/// One layer of a decoder: attention, then an MLP, each on normalised features and added to what came in.
#[derive(Debug, Clone, ModuleParameters)]
pub struct Layer {
    /// Norm before the attention.
    #[param]
    pub input_layernorm: RmsNorm,
    /// Attention.
    #[param]
    pub self_attn: Attention,
    /// Norm before the MLP.
    #[param]
    pub post_attention_layernorm: RmsNorm,
    /// MLP.
    #[param]
    pub mlp: Mlp,
}

/// Causal self-attention in which several query heads share a head of keys and values (arXiv 2305.13245).
#[derive(Debug, Clone, ModuleParameters)]
pub struct Attention {
    /// Queries `[heads * head_dim, hidden_size]`.
    #[param]
    pub q_proj: Projection,
    /// Keys `[kv_heads * head_dim, hidden_size]`.
    #[param]
    pub k_proj: Projection,
    /// Values `[kv_heads * head_dim, hidden_size]`.
    #[param]
    pub v_proj: Projection,
    /// Output `[hidden_size, heads * head_dim]`.
    #[param]
    pub o_proj: Projection,
    /// Qwen3's norm of each query head, `[head_dim]`.
    #[param]
    pub q_norm: Option<RmsNorm>,
    /// Qwen3's norm of each key head, `[head_dim]`.
    #[param]
    pub k_norm: Option<RmsNorm>,
    pub(crate) head_dim: i32,
}

/// A gated MLP: `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone, ModuleParameters)]
pub struct Mlp {
    /// Gate `[intermediate_size, hidden_size]`.
    #[param]
    pub gate_proj: Projection,
    /// Up `[intermediate_size, hidden_size]`.
    #[param]
    pub up_proj: Projection,
    /// Down `[hidden_size, intermediate_size]`.
    #[param]
    pub down_proj: Projection,
}

impl Model {
    /// The model's dimensions and settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Every linear module, in the order of the forward pass, as it was in the folder.
    pub fn linears(&self) -> &[LinearInfo] {
        &self.linears
    }

    /// The linear modules of each layer, in the order of [`Model::linears`], with their names from the layer.
    pub fn projections_mut(&mut self) -> impl Iterator<Item = (usize, &'static str, &mut Projection)> {
        self.model.layers.iter_mut().enumerate().flat_map(|(index, layer)| {
            let Layer { self_attn: attention, mlp, .. } = layer;
            [
                ("self_attn.q_proj", &mut attention.q_proj),
                ("self_attn.k_proj", &mut attention.k_proj),
                ("self_attn.v_proj", &mut attention.v_proj),
                ("self_attn.o_proj", &mut attention.o_proj),
                ("mlp.gate_proj", &mut mlp.gate_proj),
                ("mlp.up_proj", &mut mlp.up_proj),
                ("mlp.down_proj", &mut mlp.down_proj),
            ]
            .map(|(name, projection)| (index, name, projection))
        })
    }

    /// An empty cache for one sequence.
    pub fn new_cache(&self) -> KvCache {
        KvCache::new(self.model.layers.len())
    }

    /// Features `[1, tokens, hidden_size]` of the tokens that follow those in `cache`, which it appends them to. Lazy.
    /// After an error the cache may hold them in some layers only.
    ///
    /// # Errors
    /// [`Error::Tokens`] for no token, one outside the vocabulary, or another model's cache; an error of MLX's.
    pub fn hidden(&mut self, tokens: &[u32], cache: &mut KvCache) -> Result<Array, Error> {
        if cache.layers.len() != self.model.layers.len() {
            return Err(Error::Tokens {
                found: format!("a cache of {} layers", cache.layers.len()),
                expected: format!("one of {}", self.model.layers.len()),
            });
        }
        let mut x = self.embed(tokens)?;
        for (index, cache) in cache.layers.iter_mut().enumerate() {
            x = self.layer(index, &x, cache, None)?;
        }
        Ok(self.model.norm.forward(&x)?)
    }

    /// Embeddings `[1, tokens, hidden_size]`, what the first layer takes. Lazy.
    ///
    /// # Errors
    /// As [`Model::hidden`].
    pub fn embed(&mut self, tokens: &[u32]) -> Result<Array, Error> {
        let vocabulary = self.config.vocab_size as u32;
        if let Some(token) = tokens.iter().find(|&&t| t >= vocabulary) {
            return Err(Error::Tokens {
                found: format!("token {token}"),
                expected: format!("one of the vocabulary's {vocabulary}"),
            });
        }
        let length = i32::try_from(tokens.len()).ok().filter(|&n| n > 0).ok_or_else(|| Error::Tokens {
            found: format!("{} tokens", tokens.len()),
            expected: "from 1 to 2147483647".to_owned(),
        })?;
        Ok(self.model.embed_tokens.forward(&Array::from_slice(tokens, &[1, length]))?)
    }

    /// Layer `index` alone: x `[1, tokens, hidden_size]` gives the same shape. Lazy. `observer` sees what its linear
    /// modules are given.
    ///
    /// # Errors
    /// An error of MLX's or of the observer's.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(
        &mut self,
        index: usize,
        x: &Array,
        cache: &mut LayerCache,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Array, Exception> {
        let rope = &self.model.rope;
        self.model.layers[index].forward(x, rope, cache, &mut Tap(observer))
    }

    /// Logits `[1, tokens, vocab_size]` of features that [`Model::hidden`] returned. Lazy.
    ///
    /// # Errors
    /// An error of MLX's.
    pub fn logits(&mut self, hidden: &Array) -> Result<Array, Exception> {
        match (&mut self.lm_head, &self.model.embed_tokens) {
            (Some(head), _) => head.forward(hidden),
            (None, MaybeQuantized::Original(embedding)) => embedding.as_linear(hidden),
            (None, MaybeQuantized::Quantized(embedding)) => embedding.as_linear(hidden),
        }
    }

    /// Logits of every token, `[1, tokens, vocab_size]`. Lazy.
    ///
    /// # Errors
    /// As [`Model::hidden`].
    pub fn forward(&mut self, tokens: &[u32], cache: &mut KvCache) -> Result<Array, Error> {
        let hidden = self.hidden(tokens, cache)?;
        Ok(self.logits(&hidden)?)
    }

    /// Logits that follow the last token, `[vocab_size]` in float32. Lazy.
    ///
    /// # Errors
    /// As [`Model::hidden`].
    pub fn next_logits(&mut self, tokens: &[u32], cache: &mut KvCache) -> Result<Array, Error> {
        let hidden = self.hidden(tokens, cache)?;
        let last = hidden.try_index((.., -1, ..))?;
        Ok(self.logits(&last)?.reshape(&[-1])?.as_dtype(Dtype::Float32)?)
    }
}

/// An observer, if there is one.
struct Tap<'a>(Option<&'a mut dyn Observer>);

impl Tap<'_> {
    fn inputs(&mut self, modules: &[&'static str], x: &Array) -> Result<(), Exception> {
        self.0.as_mut().map_or(Ok(()), |observer| observer.inputs(modules, x))
    }
}

impl Layer {
    fn forward(
        &mut self,
        x: &Array,
        rope: &Rope,
        cache: &mut LayerCache,
        tap: &mut Tap<'_>,
    ) -> Result<Array, Exception> {
        let attended = self.self_attn.forward(&self.input_layernorm.forward(x)?, rope, cache, tap)?;
        let x = x.add(attended)?;
        let gated = self.mlp.forward(&self.post_attention_layernorm.forward(&x)?, tap)?;
        x.add(gated)
    }
}

impl Attention {
    fn forward(
        &mut self,
        x: &Array,
        rope: &Rope,
        cache: &mut LayerCache,
        tap: &mut Tap<'_>,
    ) -> Result<Array, Exception> {
        let length = x.dim(1);
        tap.inputs(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], x)?;
        let q = self.q_proj.forward(x)?;
        let k = self.k_proj.forward(x)?;
        let v = self.v_proj.forward(x)?;
        let q = rope.apply(&heads(&q, self.head_dim, self.q_norm.as_mut())?, cache.offset())?;
        let k = rope.apply(&heads(&k, self.head_dim, self.k_norm.as_mut())?, cache.offset())?;
        let (k, v) = cache.append(&k, &heads(&v, self.head_dim, None)?)?;
        // A single token sees everything there is.
        let mask = (length > 1).then_some(ScaledDotProductAttentionMask::Causal);
        let scale = (self.head_dim as f32).sqrt().recip();
        let y = scaled_dot_product_attention(&q, &k, &v, scale, mask, None)?;
        let y = y.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, length, -1])?;
        tap.inputs(&["self_attn.o_proj"], &y)?;
        self.o_proj.forward(&y)
    }
}

/// `[1, tokens, heads * head_dim]` as `[1, heads, tokens, head_dim]`, each head normalised if there is a norm.
fn heads(x: &Array, head_dim: i32, norm: Option<&mut RmsNorm>) -> Result<Array, Exception> {
    let split = x.reshape(&[1, x.dim(1), -1, head_dim])?;
    let normed = norm.map_or(Ok(split.clone()), |norm| norm.forward(&split))?;
    normed.transpose_axes(&[0, 2, 1, 3])
}

impl Mlp {
    fn forward(&mut self, x: &Array, tap: &mut Tap<'_>) -> Result<Array, Exception> {
        tap.inputs(&["mlp.gate_proj", "mlp.up_proj"], x)?;
        let gate = silu(self.gate_proj.forward(x)?)?;
        let gated = gate.multiply(self.up_proj.forward(x)?)?;
        tap.inputs(&["mlp.down_proj"], &gated)?;
        self.down_proj.forward(&gated)
    }
}

/// A norm of a given weight.
pub(crate) fn rms_norm(weight: Array, eps: f32) -> RmsNorm {
    RmsNorm { weight: Param::new(weight), eps }
}
