// Ranks pages by the words of a question that they have: a rare word weighs more than a common one,
// a word of the title more than one of a section's heading, and that more than one of the text. No
// word is required, since questions have words that no page has. A result links to the section
// whose heading has the most of the question.
const TITLE = 2, HEADING = 1, OBJECT = 10; // weights; an object is a name of the API
const SHOWN = 0.4; // results that score at least this share of the best
const LOWERED = { log: 0.4 }; // what was tried and dropped has the words of a task, not its answer

Search._performSearch = (query, words, excluded, _highlighted, names) => {
  const index = Search._index, stemmer = new Stemmer();
  const pages = (record) => [record ?? []].flat(); // one page is stored as a number
  const lookUp = (word, table) => (Object.hasOwn(table, word) ? pages(table[word]) : []);
  const lookUpPart = (word) =>
    Object.keys(index.terms).filter((term) => word.length > 3 && term.includes(word))
      .flatMap((term) => pages(index.terms[term]));

  const lengths = index.docnames.map(() => 0); // in different words
  Object.values(index.terms).flatMap(pages).forEach((page) => lengths[page]++);
  const average = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;

  const weights = new Map(), having = new Map();
  for (const word of words) {
    const whole = [...lookUp(word, index.terms), ...lookUp(word, index.titleterms)];
    having.set(word, new Set(whole.length ? whole : lookUpPart(word)));
    const rarity = Math.log(1 + lengths.length / having.get(word).size);
    const share = /[\u4e00-\u9fff]/.test(word) ? 0.5 : 1; // pairs of characters overlap
    weights.set(word, having.get(word).size ? share * rarity : 0);
  }
  const weigh = (stems) => stems.reduce((sum, word) => sum + (weights.get(word) ?? 0), 0);
  const weighText = (text) =>
    weigh([...new Set(splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word)))]);

  const sections = index.docnames.map(() => ({ heading: "", anchor: "", weight: 0 }));
  for (const [heading, places] of Object.entries(index.alltitles)) {
    const weight = weighText(heading);
    for (const [page, anchor] of places)
      if (anchor !== null && weight > sections[page].weight)
        sections[page] = { heading: ` > ${heading}`, anchor: "#" + anchor, weight };
  }

  const results = index.docnames.map((name, page) => {
    const title = index.titles[page], { heading, anchor, weight } = sections[page];
    const text = weigh([...words].filter((word) => having.get(word).has(page)));
    const length = Math.max(1, (1 + lengths[page] / average) / 2);
    const unwanted = [...excluded].some((word) => lookUp(word, index.terms).includes(page));
    const score = unwanted ? 0 : text / length + TITLE * weighText(title) + HEADING * weight;
    const ranked = score * (LOWERED[name] ?? 1);
    return [name, title + heading, anchor, null, ranked, index.filenames[page], "text"];
  });
  const best = Math.max(...results.map((result) => result[4]));
  const objects = [...names].flatMap((name) => Search.performObjectSearch(name, names));
  objects.forEach((object) => { object[4] += OBJECT; });
  return results.filter((result) => result[4] > 0 && result[4] >= SHOWN * best)
    .concat(objects)
    .sort(_orderResultsByScoreThenName);
};
