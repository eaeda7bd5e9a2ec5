//! From a folder to a model: every tensor taken once, checked, and nothing left over.

use std::collections::HashMap;
use std::path::Path;

use mlx_rs::module::{ModuleParameters, Param};
use mlx_rs::nn::{Embedding, Linear, QuantizedEmbedding, QuantizedLinear, RmsNorm};
use mlx_rs::quantization::MaybeQuantized;
use mlx_rs::transforms::eval_params;
use mlx_rs::{Array, Dtype as MlxDtype};
use mlx_trellis::artifact::to_array;
use mlx_trellis::{MaybeTrellis, TrellisLinear};
use trellis_codec::artifact::{Artifact, Dtype, Entry, Quantization, RawTensor};

use crate::config::{Config, Family};
use crate::error::Error;
use crate::model::{Attention, Decoder, Layer, Mlp, Model, Projection, rms_norm};
use crate::rope::Rope;

/// What a decoder's tensors start with: alone in its folder, or as the language model of a larger one.
const ROOTS: [&str; 2] = ["model", "language_model.model"];

/// The format's other spelling of the second root.
const TWIN_ROOT: &str = "model.language_model.";

/// Buffers of no use to this decoder that some folders hold: frequencies of the rotary embedding, computed here.
const IGNORED: &[&str] = &[".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached"];

/// Groups and bits of MLX's affine quantization.
const AFFINE_GROUPS: [u64; 3] = [32, 64, 128];
const AFFINE_BITS: [u64; 6] = [2, 3, 4, 5, 6, 8];

/// How [`Model::load`] loads.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// The dtype that every floating-point tensor is cast to, and so that activations have; as stored if `None`. A
    /// trellis module's scales stay float16, as the format has them.
    pub dtype: Option<MlxDtype>,
}

/// The form in which a linear module is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinearForm {
    /// One number a weight.
    Dense,
    /// MLX's affine quantization.
    Affine {
        /// Bits a weight.
        bits: i32,
        /// Weights that share a scale and a bias.
        group_size: i32,
    },
    /// Trellis codes.
    Trellis {
        /// Bits a weight.
        bits: u32,
    },
}

/// A linear module as it was stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearInfo {
    /// Its path, as its tensors spell it.
    pub path: String,
    /// Form of its weight.
    pub form: LinearForm,
    /// Output features.
    pub out_features: usize,
    /// Input features.
    pub in_features: usize,
    /// Bytes of everything stored for its weight: codes, scales and whatever else, but not its additive bias.
    pub bytes: usize,
    /// Whether it is the output projection rather than part of a layer.
    pub is_head: bool,
}

impl Model {
    /// Loads a folder (or a safetensors file with its `config.json` beside it). The files are mapped while it does, and
    /// must not change.
    ///
    /// # Errors
    /// What [`Artifact::open`] and [`Config::from_json`] refuse; a tensor that is missing, of another shape or type than
    /// the configuration asks for, or unknown; a module quantized in a way other than trellis and MLX affine.
    pub fn load(path: impl AsRef<Path>, options: &LoadOptions) -> Result<Self, Error> {
        Self::from_artifact(&Artifact::open(path)?, options)
    }

    /// [`Model::load`] on a folder that is already open.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn from_artifact(artifact: &Artifact, options: &LoadOptions) -> Result<Self, Error> {
        let location = artifact.tensors().location();
        let folder = if location.is_dir() { location } else { location.parent().unwrap_or(Path::new("")) };
        let config = Config::from_json(&folder.join("config.json"), artifact.config())?;
        Loader::new(artifact, config, options).model()
    }
}

struct Loader<'a> {
    artifact: &'a Artifact,
    config: Config,
    dtype: Option<MlxDtype>,
    root: &'static str,
    /// Tensors that nothing has taken yet, by their names in the first of the format's key spaces.
    rest: HashMap<String, Named<'a>>,
    linears: Vec<LinearInfo>,
}

/// A tensor with the name that its file has for it.
#[derive(Clone, Copy)]
struct Named<'a> {
    name: &'a str,
    tensor: RawTensor<'a>,
}

/// MLX's affine quantization of one module.
#[derive(Clone, Copy)]
struct Affine {
    bits: i32,
    group_size: i32,
}

impl<'a> Loader<'a> {
    fn new(artifact: &'a Artifact, config: Config, options: &LoadOptions) -> Self {
        let mut rest = HashMap::new();
        for (name, tensor) in artifact.tensors().iter() {
            let key = match name.strip_prefix(TWIN_ROOT) {
                Some(tail) => format!("{}.{tail}", ROOTS[1]),
                None => name.to_owned(),
            };
            // A second spelling of a name stays under its own, and so is left over.
            let key = if rest.contains_key(&key) { name.to_owned() } else { key };
            rest.insert(key, Named { name, tensor });
        }
        let alone = rest.contains_key(&format!("{}.embed_tokens.weight", ROOTS[0]));
        let inside = rest.contains_key(&format!("{}.embed_tokens.weight", ROOTS[1]));
        let root = ROOTS[usize::from(inside && !alone)];
        Self { artifact, config, dtype: options.dtype, root, rest, linears: Vec::new() }
    }

    fn model(mut self) -> Result<Model, Error> {
        let Config { vocab_size, hidden_size, num_hidden_layers, .. } = self.config;
        let embed_tokens = self.embedding(&format!("{}.embed_tokens", self.root), vocab_size, hidden_size)?;
        let layers = (0..num_hidden_layers).map(|i| self.layer(i)).collect::<Result<Vec<_>, _>>()?;
        let norm = self.norm(&format!("{}.norm", self.root), hidden_size)?;
        let lm_head = self.head()?;
        self.nothing_left()?;
        let rope = Rope::new(&self.config);
        let model = Decoder { embed_tokens, layers, norm, rope };
        Ok(Model { model, lm_head, config: self.config, linears: self.linears })
    }

    fn layer(&mut self, index: i32) -> Result<Layer, Error> {
        let c = self.config.clone();
        let path = format!("{}.layers.{index}", self.root);
        let hidden = c.hidden_size;
        let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let head_norm = |loader: &mut Self, name| match c.family {
            Family::Llama => Ok(None),
            Family::Qwen3 => loader.norm(&format!("{path}.self_attn.{name}"), c.head_dim).map(Some),
        };
        let attention = |loader: &mut Self, name, out, inputs| {
            loader.linear(&format!("{path}.self_attn.{name}"), out, inputs, c.attention_bias)
        };
        let mlp = |loader: &mut Self, name, out, inputs| {
            loader.linear(&format!("{path}.mlp.{name}"), out, inputs, c.mlp_bias)
        };
        let layer = Layer {
            input_layernorm: self.norm(&format!("{path}.input_layernorm"), hidden)?,
            self_attn: Attention {
                q_proj: attention(self, "q_proj", q, hidden)?,
                k_proj: attention(self, "k_proj", kv, hidden)?,
                v_proj: attention(self, "v_proj", kv, hidden)?,
                o_proj: attention(self, "o_proj", hidden, q)?,
                q_norm: head_norm(self, "q_norm")?,
                k_norm: head_norm(self, "k_norm")?,
                head_dim: c.head_dim,
            },
            post_attention_layernorm: self.norm(&format!("{path}.post_attention_layernorm"), hidden)?,
            mlp: Mlp {
                gate_proj: mlp(self, "gate_proj", c.intermediate_size, hidden)?,
                up_proj: mlp(self, "up_proj", c.intermediate_size, hidden)?,
                down_proj: mlp(self, "down_proj", hidden, c.intermediate_size)?,
            },
        };
        // So that no more than one layer is held twice while its tensors are cast.
        eval_params(layer.parameters())?;
        Ok(layer)
    }

    /// The output projection. A folder whose embedding is tied may hold it all the same, as a copy of the embedding.
    fn head(&mut self) -> Result<Option<Projection>, Error> {
        let inside = "language_model.lm_head";
        let has = |path: &str| self.rest.contains_key(&format!("{path}.weight"));
        let path = if has(inside) && !has("lm_head") { inside } else { "lm_head" };
        let Config { vocab_size, hidden_size, tie_word_embeddings, .. } = self.config;
        if !tie_word_embeddings {
            let head = self.linear(path, vocab_size, hidden_size, false)?;
            if let Some(info) = self.linears.last_mut() {
                info.is_head = true;
            }
            return Ok(Some(head));
        }
        for part in ["weight", "scales", "biases"] {
            let copy = format!("{path}.{part}");
            let embedding = self.artifact.tensors().get(&format!("{}.embed_tokens.{part}", self.root));
            if self.rest.get(&copy).is_some_and(|copy| Some(copy.tensor) == embedding) {
                self.rest.remove(&copy);
            }
        }
        Ok(None)
    }

    fn linear(&mut self, path: &str, out: i32, inputs: i32, bias: bool) -> Result<Projection, Error> {
        let parts = |rest: &HashMap<String, Named<'_>>| -> usize {
            let under = |name: &str| name.strip_prefix(path).is_some_and(|tail| tail.starts_with('.'));
            let bias = format!("{path}.bias");
            rest.iter().filter(|(k, _)| under(k) && **k != bias).map(|(_, n)| n.tensor.bytes.len()).sum()
        };
        let bytes = parts(&self.rest);
        let (form, layer) = match self.artifact.entry(path) {
            Entry::Trellis(_) => self.trellis(path, out, inputs, bias)?,
            entry => match self.affine(path, entry)? {
                Some(affine) => {
                    let [weight, scales, biases] = self.affine_parts(path, out, inputs, affine)?;
                    let inner = Linear { weight, bias: Param::new(self.bias(path, out, bias)?) };
                    let Affine { bits, group_size } = affine;
                    let layer = QuantizedLinear { group_size, bits, scales, biases, inner };
                    (LinearForm::Affine { bits, group_size }, original(MaybeQuantized::Quantized(layer)))
                }
                None => {
                    let weight = Param::new(self.float(&format!("{path}.weight"), &[out, inputs])?);
                    let layer = Linear { weight, bias: Param::new(self.bias(path, out, bias)?) };
                    (LinearForm::Dense, original(MaybeQuantized::Original(layer)))
                }
            },
        };
        let path = path.to_owned();
        let (out_features, in_features) = (out as usize, inputs as usize);
        self.linears.push(LinearInfo { path, form, out_features, in_features, bytes, is_head: false });
        Ok(layer)
    }

    fn trellis(
        &mut self,
        path: &str,
        out: i32,
        inputs: i32,
        bias: bool,
    ) -> Result<(LinearForm, Projection), Error> {
        let mut layer = TrellisLinear::from_open_artifact(self.artifact, path)?;
        let has_bias = layer.bias.value.is_some();
        if layer.shape() != (out, inputs) || has_bias != bias {
            let with = |bias| if bias { " with a bias" } else { " without a bias" };
            let (found_out, found_in) = layer.shape();
            return Err(Error::Module {
                location: self.artifact.tensors().location().to_owned(),
                module: path.to_owned(),
                found: format!("[{found_out}, {found_in}]{}", with(has_bias)),
                expected: format!("[{out}, {inputs}]{}", with(bias)),
            });
        }
        if let (Some(bias), Some(dtype)) = (&layer.bias.value, self.dtype) {
            layer.bias = Param::new(Some(bias.as_dtype(dtype)?));
        }
        // The artifact's reader has refused what does not belong to the module.
        let prefix = format!("{path}.");
        self.rest.retain(|key, _| !key.starts_with(&prefix));
        Ok((LinearForm::Trellis { bits: layer.geometry().bits() }, MaybeTrellis::Trellis(layer)))
    }

    fn embedding(
        &mut self,
        path: &str,
        rows: i32,
        features: i32,
    ) -> Result<MaybeQuantized<Embedding>, Error> {
        let entry = self.artifact.entry(path);
        if let Entry::Trellis(entry) = entry {
            return Err(Error::Module {
                location: self.artifact.tensors().location().to_owned(),
                module: path.to_owned(),
                found: entry.to_string(),
                expected: "an embedding that is dense or MLX affine".to_owned(),
            });
        }
        let Some(affine) = self.affine(path, entry)? else {
            let weight = Param::new(self.float(&format!("{path}.weight"), &[rows, features])?);
            return Ok(MaybeQuantized::Original(Embedding { weight }));
        };
        let [weight, scales, biases] = self.affine_parts(path, rows, features, affine)?;
        let Affine { bits, group_size } = affine;
        let inner = Embedding { weight };
        Ok(MaybeQuantized::Quantized(QuantizedEmbedding { group_size, bits, scales, biases, inner }))
    }

    /// Whether a module is quantized as MLX does, and how. One without an entry is if it has scales: MLX's own rule.
    fn affine(&self, path: &str, entry: Entry) -> Result<Option<Affine>, Error> {
        let scales = format!("{path}.scales");
        let quantization = match entry {
            Entry::NotQuantized => return Ok(None),
            Entry::Other(quantization) => quantization,
            _ if !self.rest.contains_key(&scales) => return Ok(None),
            _ => match self.artifact.default_quantization() {
                Some(default) => default.clone(),
                None => {
                    return Err(self.refuse_quantization(path, "scales", "nothing", "how it is quantized"));
                }
            },
        };
        let Quantization { bits, group_size, mode } = quantization;
        if let Some(mode) = mode.filter(|mode| mode != "affine") {
            return Err(self.refuse_quantization(path, "mode", &mode, "affine or trellis"));
        }
        let number = |key, value: Option<u64>, legal: &[u64]| match value.filter(|v| legal.contains(v)) {
            Some(value) => Ok(value as i32),
            None => {
                let found = value.map_or_else(|| "nothing".to_owned(), |v| v.to_string());
                Err(self.refuse_quantization(path, key, &found, &format!("one of {legal:?}")))
            }
        };
        let bits = number("bits", bits, &AFFINE_BITS)?;
        Ok(Some(Affine { bits, group_size: number("group_size", group_size, &AFFINE_GROUPS)? }))
    }

    fn refuse_quantization(&self, path: &str, key: &str, found: &str, expected: &str) -> Error {
        let location = self.artifact.tensors().location();
        Error::setting(location, format!("config.json: quantization of {path}: {key}"), found, expected)
    }

    /// Codes `[rows, cols * bits / 32]`, scales and biases `[rows, cols / group_size]`.
    fn affine_parts(
        &mut self,
        path: &str,
        rows: i32,
        cols: i32,
        affine: Affine,
    ) -> Result<[Param<Array>; 3], Error> {
        let Affine { bits, group_size } = affine;
        if cols % group_size != 0 {
            let expected = format!("a divisor of the module's {cols} input features");
            return Err(self.refuse_quantization(path, "group_size", &group_size.to_string(), &expected));
        }
        // Whole words, as a group is of 32 weights or a multiple.
        let words = i64::from(cols) * i64::from(bits) / 32;
        let weight =
            self.take(&format!("{path}.weight"), &[rows, words as i32], "U32", |d| d == Dtype::U32)?;
        let scales = self.float(&format!("{path}.scales"), &[rows, cols / group_size])?;
        let biases = self.float(&format!("{path}.biases"), &[rows, cols / group_size])?;
        Ok([Param::new(to_array(&weight)?), Param::new(scales), Param::new(biases)])
    }

    fn bias(&mut self, path: &str, out: i32, wanted: bool) -> Result<Option<Array>, Error> {
        wanted.then(|| self.float(&format!("{path}.bias"), &[out])).transpose()
    }

    fn norm(&mut self, path: &str, features: i32) -> Result<RmsNorm, Error> {
        let weight = self.float(&format!("{path}.weight"), &[features])?;
        Ok(rms_norm(weight, self.config.rms_norm_eps))
    }

    fn float(&mut self, name: &str, shape: &[i32]) -> Result<Array, Error> {
        let legal = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let array = to_array(&self.take(name, shape, "F32, F16 or BF16", legal)?)?;
        Ok(match self.dtype {
            Some(dtype) => array.as_dtype(dtype)?,
            None => array,
        })
    }

    /// The tensor called `key`, which nothing else may take.
    fn take(
        &mut self,
        key: &str,
        shape: &[i32],
        dtypes: &str,
        legal: impl Fn(Dtype) -> bool,
    ) -> Result<RawTensor<'a>, Error> {
        let expected = format!("{dtypes} {shape:?}");
        let Some(Named { name, tensor }) = self.rest.remove(key) else {
            let location = self.artifact.tensors().location().to_owned();
            return Err(Error::MissingTensor { location, tensor: key.to_owned(), expected });
        };
        if legal(tensor.dtype) && tensor.shape.iter().copied().eq(shape.iter().map(|&d| d as usize)) {
            return Ok(tensor);
        }
        Err(Error::Tensor {
            file: self.artifact.tensors().file_of(name).to_owned(),
            tensor: name.to_owned(),
            found: tensor.dtype,
            found_shape: tensor.shape.to_vec(),
            expected,
        })
    }

    /// Of a larger model, what lies beside the language model is not this decoder's business.
    fn nothing_left(&self) -> Result<(), Error> {
        let beside = |key: &str| {
            self.root == ROOTS[1] && !key.starts_with("language_model.") && !key.starts_with("lm_head.")
        };
        let known = |key: &str| IGNORED.iter().any(|suffix| key.ends_with(suffix)) || beside(key);
        let mut left: Vec<_> = self.rest.iter().filter(|(key, _)| !known(key)).map(|(_, n)| n.name).collect();
        left.sort_unstable();
        match left.first() {
            None => Ok(()),
            Some(first) => Err(Error::UnknownTensors {
                file: self.artifact.tensors().file_of(first).to_owned(),
                tensor: (*first).to_owned(),
                count: left.len(),
            }),
        }
    }
}

fn original(layer: MaybeQuantized<Linear>) -> Projection {
    MaybeTrellis::Original(layer)
}
